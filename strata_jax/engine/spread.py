"""A bank whose experts repeat: the distinct blobs go to the device once, and their copies come back from it.

Copying on the device and writing to pinned memory runs at the link's rate; copying in pageable memory does not.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


def spread_blobs(
    distinct: NDArray[np.uint32], ids: NDArray[np.integer], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Return u32[X, words], where row x is ``distinct[ids[x]]``, in the memory that ``sharding`` names.

    Takes X blobs of device memory while it runs.
    """
    return _gather(sharding)(jnp.asarray(distinct), jnp.asarray(ids, jnp.int32))


@lru_cache(maxsize=4)
def _gather(sharding: jax.sharding.Sharding | None):  # type: ignore[no-untyped-def]
    return jax.jit(lambda blobs, ids: jnp.take(blobs, ids, axis=0), out_shardings=sharding)
