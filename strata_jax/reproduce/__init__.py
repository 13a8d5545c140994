"""Published tables as data, translated to runs of the planner and simulator, and compared with them cell by cell."""
