"""What a run leaves behind: the run directory and the tables on the terminal."""

from strata_jax.report.record import RunRecord, Terminated

__all__ = ["RunRecord", "Terminated"]
