"""Hydra's basic sweeper without composing every job twice: a job costs half as much before it starts.

The basic sweeper composes all jobs to find mistakes early, then the launcher composes each again. Here a value that
sets one number or word is tried on one composed configuration, and only new group options, which decide what files
are read, are composed beforehand. Hydra finds this module because the folder lies next to run.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf


class QuickSweeper(BasicSweeper):
    """All combinations of the given values, like the basic sweeper. Chosen in conf/config.yaml."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Raise what composing the jobs would raise, without composing those that only differ in plain values."""
        if self.hydra_context is None or self.config is None:
            raise RuntimeError("a sweeper is set up before it sweeps")
        loader = self.hydra_context.config_loader
        parser = OverridesParser.create(config_loader=loader)
        trial = self.config.copy()
        keys = {_key(text) for overrides in batch for text in overrides}
        groups = {key for key in keys if loader.get_group_options(key)}
        composed: set[tuple[str, ...]] = set()
        tried: set[str] = set()
        for overrides in batch:
            parsed = [parser.parse_override(text) for text in overrides if text not in tried]
            tried.update(overrides)
            choices = tuple(text for text in overrides if _key(text) in groups)
            if choices not in composed:
                composed.add(choices)
                loader.load_sweep_config(self.config, list(overrides))
                continue
            for override in parsed:
                OmegaConf.update(trial, override.key_or_group, override.value())


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0].partition("@")[0]
