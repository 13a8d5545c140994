"""The memory ledger and the planner. Pure functions on plain data; imports nothing from JAX.

Start at ``plan.py``: `PlanRequest` -> `plan` -> `MemoryPlan`.
"""
