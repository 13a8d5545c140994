"""The exact state of a sequence in host memory: captured, put back, compared.

A `Checkpoint` is what does not grow with the sequence: recurrent states, raw index keys of incomplete blocks, n-gram
history, the trunk's last streams. Together with the cells and index keys of the same tokens, which later tokens leave
alone, it is the whole state: while they are still on the device it brings the sequence back to its point. An `Image` is
a checkpoint and those cells and keys.

Arrays are named ``section/place/what``; the sections are `SECTIONS`. Every array has memory of its own on the host and
is never written again, so that checkpoints and images may share it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import jax
import numpy as np

from strata_jax.engine.arena import CellLayout
from strata_jax.engine.attention import IndexState
from strata_jax.engine.cell_store import read_cells_of, write_cells_of
from strata_jax.engine.cell_window import window_before
from strata_jax.engine.engine import Engine
from strata_jax.engine.gdn import GdnState
from strata_jax.engine.model import SequenceState, State
from strata_jax.engine.rounds import withdraw
from strata_jax.engine.row_copies import read_rows, write_rows
from strata_jax.engine.session import Session
from strata_jax.policies.moves import MoveKind

SECTIONS = ("gdn", "ple", "index", "kv", "mtp")

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The state after ``num_tokens`` tokens without its cells and the index keys of complete blocks."""

    num_tokens: int
    drafts_usable: bool
    arrays: Arrays

    @property
    def bytes(self) -> int:
        return array_bytes(self.arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """The whole state after ``token_ids: i32[n]``.

    Attributes:
        end: the part that a checkpoint holds.
        cells: per attention layer u32[pages, page_words], the used pages of cells in order, and f32[blocks, d_index],
            the index keys of complete blocks.
        layout: how cells lie in the pages.
    """

    token_ids: np.ndarray
    end: Checkpoint
    cells: Arrays
    layout: CellLayout

    @property
    def bytes(self) -> int:
        return self.token_ids.nbytes + self.end.bytes + array_bytes(self.cells)

    def arrays(self) -> Iterator[np.ndarray]:
        """Every array, for accounts of what several images share."""
        return chain([self.token_ids], self.end.arrays.values(), self.cells.values())


def array_bytes(arrays: Arrays) -> int:
    """The bytes of arrays."""
    return sum(x.nbytes for x in arrays.values())


def checkpoint_bytes(engine: Engine) -> int:
    """The bytes of one checkpoint, whatever its place, by the shapes of the engine's states."""
    shapes = jax.eval_shape(engine.empty_state)
    return sum(x.size * x.dtype.itemsize for x in _carried(shapes).values())


def image_bytes(engine: Engine, num_tokens: int) -> int:
    """The bytes of an image of ``num_tokens`` tokens."""
    pages = num_pages(engine, num_tokens) * engine.plan.num_kv_layers * engine.plan.page_bytes
    rows = sum(num_tokens // ratio for _, _, ratio in _attention_rows(engine) if ratio)
    ids = num_tokens * np.dtype(np.int32).itemsize
    return ids + checkpoint_bytes(engine) + pages + rows * engine.geometry.index_dim * np.dtype(np.float32).itemsize


def num_pages(engine: Engine, num_tokens: int) -> int:
    """Pages per attention layer that hold the cells of ``num_tokens`` tokens."""
    return -(-num_tokens // engine.plan.cells_per_page)


def take_checkpoint(session: Session) -> Checkpoint:
    """Copy what a checkpoint holds to the host; the session goes on unchanged."""
    _check_owner(session)
    arrays = {name: np.array(x) for name, x in _carried(session.state).items()}
    return Checkpoint(len(session.tokens), session.drafts_usable, arrays)


def capture(session: Session) -> Image:
    """Copy the whole state to the host; the session goes on unchanged."""
    session.check_cells()
    end = take_checkpoint(session)
    engine, count, cells = session.engine, len(session.tokens), {}
    pages = _page_table(engine, count)
    for row, (layer, name, ratio) in enumerate(_attention_rows(engine)):
        if len(pages[row]):
            cells[_cells_name(name, row)] = read_cells_of(engine, row, pages[row])
        keys = _index_state(session.state, layer, engine)
        if keys is not None and count // ratio:
            rows = np.arange(count // ratio, dtype=np.int32)
            cells[_keys_name(name, layer)] = read_rows(engine.programs, keys.keys, rows)
    return Image(np.array(session.tokens, np.int32), end, cells, engine.programs.spec.cells)


def restore(session: Session, image: Image, checkpoint: Checkpoint | None = None) -> None:
    """Give the session the state of an image, or of a checkpoint inside it, in whatever pages its cells have now.

    Everything is checked before anything is written. If writing fails, the session cannot go on and its cells belong to
    no sequence; the image is as it was.

    Raises:
        ValueError: the image is of another model or layout, or the checkpoint is not inside it.
        RuntimeError: cells that it needs are not mapped, or the session does not own the cells.
    """
    _check_owner(session)
    engine, point = session.engine, checkpoint or image.end
    check_restorable(engine, image, point)
    count = point.num_tokens
    with _overwriting(session):
        if engine.cell_store is not None:
            engine.publish(window_before(engine.residency, count))
        state, pages = session.state, _page_table(engine, count)
        for row, (layer, name, ratio) in enumerate(_attention_rows(engine)):
            if len(pages[row]):
                values = image.cells[_cells_name(name, row)]
                write_cells_of(engine, row, pages[row], values[: len(pages[row])])
            index = _index_state(state, layer, engine)
            if index is not None and count // ratio:
                rows = np.arange(count // ratio, dtype=np.int32)
                for keys in write_rows(engine.programs, index.keys, rows, image.cells[_keys_name(name, layer)]):
                    session.state = state = _with_index(state, layer, IndexState(keys, index.tail), engine)
        session.state = _with_carried(state, point)
        session.now_at(image.token_ids[:count].tolist(), drafts_usable=point.drafts_usable)


def check_restorable(engine: Engine, image: Image, point: Checkpoint) -> None:
    """Verify that an image, or a checkpoint inside it, can become a session's state here; changes nothing.

    Raises:
        ValueError, RuntimeError: as `restore`.
    """
    _check_carried(jax.eval_shape(engine.empty_state), point)
    if point.num_tokens > len(image.token_ids):
        raise ValueError(
            f"a checkpoint after {point.num_tokens:,} tokens is not inside an image of {len(image.token_ids):,}"
        )
    if image.layout != engine.programs.spec.cells:
        raise ValueError(f"the image's cells are laid out as {image.layout}, here as {engine.programs.spec.cells}")
    _page_table(engine, point.num_tokens)


def roll_back(session: Session, checkpoint: Checkpoint) -> None:
    """Bring the session back to a checkpoint of its own: its cells and keys up to there are still in place.

    Raises:
        ValueError: the checkpoint is not of a prefix of the session, or of another model.
        RuntimeError: the session does not own the cells, or they are not mapped any more.
    """
    _check_owner(session)
    _check_carried(session.state, checkpoint)
    if checkpoint.num_tokens > len(session.tokens):
        raise ValueError(
            f"a checkpoint after {checkpoint.num_tokens:,} tokens is not inside a sequence of {len(session.tokens):,}"
        )
    _page_table(session.engine, checkpoint.num_tokens)
    if session.lost_from is not None and checkpoint.num_tokens > session.lost_from:
        session.check_cells()
    with _overwriting(session):
        session.state = _with_carried(session.state, checkpoint)
        session.now_at(session.tokens[: checkpoint.num_tokens], drafts_usable=checkpoint.drafts_usable)


def state_hash(session: Session) -> dict[str, str]:
    """SHA-256 of each section of a session's state: what later tokens can depend on, and nothing else."""
    return image_hash(capture(session))


def image_hash(image: Image) -> dict[str, str]:
    """SHA-256 of each section of an image; equal to `state_hash` of a session with the same state."""
    sums = {section: hashlib.sha256() for section in SECTIONS}
    for name, x in sorted({**image.end.arrays, **image.cells}.items()):
        parts = _used_cells(x, len(image.token_ids), image.layout) if name.endswith("/cells") else (x,)
        digest = sums[name.partition("/")[0]]
        digest.update(name.encode())
        for part in parts:
            digest.update(np.ascontiguousarray(part).tobytes())
    return {section: digest.hexdigest() for section, digest in sums.items()}


def _used_cells(pages: np.ndarray, count: int, layout: CellLayout) -> tuple[np.ndarray, np.ndarray]:
    """The keys u32[count, k_words] and values u32[count, v_words] in u32[pages, page_words]."""
    first_value = layout.cells_per_page * layout.k_words
    end = first_value + layout.cells_per_page * layout.v_words
    keys = pages[:, :first_value].reshape(-1, layout.k_words)
    return keys[:count], pages[:, first_value:end].reshape(-1, layout.v_words)[:count]


def _attention_rows(engine: Engine) -> Iterator[tuple[int, str, int]]:
    """Per row of the page table: layer, section of its cells and keys ("" = trunk), cells per index block."""
    g = engine.geometry
    for layer in g.attention_layers[: engine.plan.num_kv_layers]:
        yield layer, "" if layer < g.num_layers else "mtp", g.compress_ratio[layer]


def _cells_name(section: str, row: int) -> str:
    return f"{section or 'kv'}/{row}/cells"


def _keys_name(section: str, layer: int) -> str:
    return f"{section or 'index'}/{layer}/keys"


def _page_table(engine: Engine, count: int) -> np.ndarray:
    """i32[A, n], the pages of the first ``count`` cells of every attention layer; -1 = in host memory."""
    pages = np.asarray(engine.tables.kv_pages)[:, : num_pages(engine, count)]
    if engine.cell_store is None and (pages < 0).any():
        raise RuntimeError(f"not all of the first {count:,} K/V cells are mapped")
    return pages


def _index_state(state: State, layer: int, engine: Engine) -> IndexState | None:
    """The index state of an attention layer, the MTP block's included."""
    found = state.blocks[layer] if layer < engine.geometry.num_layers else state.draft
    return found if isinstance(found, IndexState) else None


def _with_index(state: State, layer: int, index: IndexState, engine: Engine) -> State:
    if layer >= engine.geometry.num_layers:
        return replace(state, draft=index)
    return replace(state, blocks=(*state.blocks[:layer], index, *state.blocks[layer + 1 :]))


def _carried(state: State) -> dict[str, jax.Array]:
    """What a checkpoint holds of a state, by name."""
    arrays: dict[str, jax.Array] = {}
    for layer, block in enumerate(state.blocks):
        if isinstance(block, GdnState):
            arrays |= {f"gdn/{layer}/memory": block.memory, f"gdn/{layer}/conv": block.conv}
        elif block is not None:
            arrays[f"index/{layer}/tail"] = block.tail
    if state.ple_history is not None:
        arrays["ple/history"] = state.ple_history
    if state.draft_tail is not None:
        # the tail of `State.draft` itself may be past a token that is not committed, and is made anew from this one
        arrays["mtp/tail"] = state.draft_tail
    return arrays | {"mtp/hidden": state.hidden}


def _with_carried(state: State, point: Checkpoint) -> State:
    """The state with everything that a checkpoint holds replaced, one array at a time: there is room for one only."""

    def put(name: str, old: jax.Array) -> jax.Array:
        new = jax.device_put(point.arrays[name], old.sharding, may_alias=False)
        old.delete()
        return new

    blocks: list[SequenceState] = []
    for layer, block in enumerate(state.blocks):
        if isinstance(block, GdnState):
            block = GdnState(put(f"gdn/{layer}/memory", block.memory), put(f"gdn/{layer}/conv", block.conv))
        elif block is not None:
            block = IndexState(block.keys, put(f"index/{layer}/tail", block.tail))
        blocks.append(block)
    draft, tail = state.draft, state.draft_tail
    if isinstance(draft, IndexState) and tail is not None:
        draft, tail = IndexState(draft.keys, put("mtp/tail", draft.tail)), put("mtp/tail", tail)
    history = state.ple_history
    return State(
        tuple(blocks), draft, tail, None if history is None else put("ple/history", history),
        put("mtp/hidden", state.hidden),
    )  # fmt: skip


def _check_carried(state: State, point: Checkpoint) -> None:
    shapes = {name: (x.shape, np.dtype(x.dtype)) for name, x in _carried(state).items()}
    found = {name: (x.shape, x.dtype) for name, x in point.arrays.items()}
    if shapes != found:
        wrong = sorted({name for name, _ in shapes.items() ^ found.items()})
        raise ValueError(f"the stored state is of another model or plan: {', '.join(wrong[:4])}")


def _check_owner(session: Session) -> None:
    withdraw(session.engine)
    if session.engine.owner is not session:
        raise RuntimeError("the K/V cells of this sequence were taken over by a later one")


@contextmanager
def _overwriting(session: Session) -> Iterator[None]:
    """The session owns nothing while its state is half written; without its arena the engine stops."""
    engine = session.engine
    engine.owner = None
    try:
        yield
    except BaseException as error:
        engine.stop_if_lost(MoveKind.RESTORE, error)
        raise
    engine.owner = session
