"""Files that readers see whole or not at all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced_on_success(path: Path) -> Iterator[Path]:
    """Yield a scratch path beside `path` that takes its place when the block ends, and is removed when it fails.

    The file has the permissions of any new file of this process.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    unfinished.touch(exist_ok=False)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
