"""A ranking of experts, the hottest first: who gets a slot. Data only; ``ranking_file.py`` reads and writes it.

Not to be confused with a hardware profile (``strata_jax/sim/profile.py``), which holds the numbers of a machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from strata_jax.errors import ConfigError

Expert = tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRanking:
    """Experts by use. Two rankings of the same order are equal, whatever else is known of them.

    Attributes:
        num_layers: layers of the trunk. num_experts: of each layer.
        with_draft: whether the draft block is ranked too; it is number `num_layers`.
        pairs: (layer, expert), each at most once, the hottest first.
        model: the model it is of; None: any model of these sizes, since some files do not say.
        usage: how often each of `pairs` was used, as counted by the run that learned it; empty: not known.
        provenance: how it came about, for readers.
        file: where it was read from; empty: nowhere yet.
        digest: SHA-256 of the sizes and the order.
    """

    num_layers: int
    num_experts: int
    with_draft: bool
    pairs: tuple[Expert, ...]
    model: str | None = None
    usage: tuple[float, ...] = ()
    provenance: Mapping[str, str | int | None] = field(default_factory=dict)
    file: str = ""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        text = f"{self.num_layers} {self.num_experts} {self.with_draft} {self.pairs}"
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertRanking) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def num_blocks(self) -> int:
        return self.num_layers + self.with_draft

    def model_problem(self, name: str, num_layers: int, num_experts: int) -> str | None:
        """Return what is wrong with using the ranking for a model, or None."""
        if (self.num_layers, self.num_experts) != (num_layers, num_experts):
            return (
                f"cache.profile={self.file}: it ranks the experts of {self.num_layers} layers with {self.num_experts}"
                f" each; the model {name} has {num_layers} layers with {num_experts}. Give a ranking of this model, or"
                " leave cache.profile at auto"
            )
        if self.model is not None and self.model != name:
            return (
                f"cache.profile={self.file}: it was learned on the model {self.model!r}; this one is {name!r}, of the"
                ' same sizes. Where their experts do the same work, write "model": null into the file'
            )
        return None

    def to_json(self) -> dict[str, str | int]:
        """Return what a plan keeps of it: enough to know it again, not the order itself."""
        return {"file": self.file, "digest": self.digest, "ranked": len(self.pairs)}

    @classmethod
    def named_in(cls, data: Mapping[str, str | int] | None, given: ExpertRanking | None) -> ExpertRanking | None:
        """Return the ranking that `to_json` described in `data`, which must be the one that is given.

        Raises ConfigError: it is another one, or none.
        """
        if data is None and given is None:
            return None
        if data is None:
            raise ConfigError(f"the plan was made without a ranking of experts; {given and given.file} is given")
        if given is None or given.digest != data["digest"]:
            found = "none is given" if given is None else f"{given.file} with digest {given.digest[:12]} is given"
            raise ConfigError(
                f"the plan follows the ranking of experts in {data['file']} with digest {str(data['digest'])[:12]};"
                f" {found}. A run keeps the one that it used as expert_ranking.json beside plan.json"
            )
        return given
