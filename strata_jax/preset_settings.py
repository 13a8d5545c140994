"""The model that settings describe where there is no file: a preset with what they change of it."""

from __future__ import annotations

from strata_jax.config.fields import AUTO
from strata_jax.config.schema import RunConfig
from strata_jax.geometry import Geometry
from strata_jax.presets import preset_geometry


def geometry_of_preset(config: RunConfig) -> Geometry:
    """Return the geometry of the preset that the settings name (`is_preset`)."""
    given = {key: str(getattr(config.quant, key)) for key in ("head", "dense", "ple")}
    types = {key: None if value == AUTO else value for key, value in given.items()}
    return preset_geometry(config.model.name, config.quant.name, **types, **synthetic_counts(config))


def synthetic_counts(config: RunConfig) -> dict[str, int | None]:
    """Return the counts that the settings give a synthetic model, as `preset_geometry` takes them."""
    model = config.model
    given = {"num_layers": model.layers, "num_experts": model.experts}
    return {key: None if count == AUTO else int(count) for key, count in given.items()}
