"""Experts copied ahead of a prompt's blocks: the same bits as without, copies that never meet a program that reads."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import expert_kernels, staging
from strata_jax.engine.chunk import _compile_chunk
from strata_jax.engine.engine import Engine, bank_sharding
from strata_jax.engine.experts import LayerBank, mixture
from strata_jax.engine.host_copies import CopiesAtOnce, CudaCopies, address
from strata_jax.engine.load import load_banks, load_weights
from strata_jax.engine.programs import Programs
from strata_jax.engine.session import Session
from strata_jax.engine.staging import MAX_COPY_BYTES, Stager, Staging, copy_runs, staged_prompt
from strata_jax.errors import ConfigError
from strata_jax.kernels.expert_gemv import ExpertLayout
from strata_jax.memory import staging as sizes
from strata_jax.memory.plan import plan
from strata_jax.memory.request import PlanRequest
from strata_jax.memory.staging import LINE_BYTES, expert_lines
from strata_jax.presets import model_shape, preset_geometry
from strata_jax.synthetic.full import SyntheticModel
from tests.engine.test_expert_kernels import with_experts

pytestmark = pytest.mark.filterwarnings("ignore:.*Pallas Triton backend:DeprecationWarning")
LAYERS, EXPERTS, CHUNK = 4, 16, 16
COUNTS = {"num_layers": LAYERS, "num_experts": EXPERTS}
BY_KERNEL = (0, 1)  # of one kind: one program to compile


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Half of the experts are resident; a buffer holds three of the others. Kernels compute nothing but experts."""
    geometry = with_experts(
        preset_geometry("synthetic_small", "q2_0", **COUNTS), dict.fromkeys(BY_KERNEL, ("Q8_0", "IQ4_NL"))
    )
    model = SyntheticModel(model_shape("synthetic_small", **COUNTS), geometry)
    request = PlanRequest(
        context_cells=128, chunk_tokens=CHUNK, kv_type="f32", expert_slots=LAYERS * EXPERTS // 2, spec_window=1,
        expert_kernels=True, stage_bytes=0,
    )  # fmt: skip
    made = plan(geometry, request)
    banks = load_banks(model, geometry, LAYERS, made.page_bytes, bank_sharding(), kernels=True)
    blob_bytes = banks[0].blobs[0].nbytes
    made = plan(geometry, replace(request, stage_bytes=2 * 3 * expert_lines(blob_bytes) * LINE_BYTES))
    assert made.staged_buckets == (CHUNK,)
    weights = load_weights(model, geometry, with_draft=False)
    engine = Engine.lay_out(model, geometry, made, weights, banks)
    spec = engine.programs.spec
    engine.programs.spec = replace(spec, kernels=False, cells=replace(spec.cells, kernels=False))
    return engine


@pytest.fixture(autouse=True)
def nothing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """These blocks are small: all of them would be read where they lie."""
    monkeypatch.setattr(sizes, "IN_PLACE_BYTES", 0)


class Noted(Stager):
    """Notes for which block and how many tokens it copies."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[int, int]] = []

    def _copy_ahead(self, layer: int, num_tokens: int) -> None:
        self.asked.append((layer, num_tokens))
        super()._copy_ahead(layer, num_tokens)


def read(engine: Engine, monkeypatch: pytest.MonkeyPatch, copies: Any = None) -> tuple[np.ndarray, list[Noted]]:
    """Logits after three chunks, the last one short; and what staged them."""
    stagers: list[Noted] = []

    def noted(*args: Any) -> Stager:
        stagers.append(Noted(*args))
        return stagers[-1]

    monkeypatch.setattr(staging, "Stager", noted)
    engine.staging = replace(Staging.of(engine.banks), copies=copies or CopiesAtOnce())
    tokens = engine.file.topic_tokens(0, 2 * CHUNK + 9)
    return Session(engine).prefill(tokens), stagers


class Nothing(CopiesAtOnce):
    """Stages experts but copies no byte."""

    def start(self, number: int, runs: Any) -> None:
        assert list(runs)


def test_a_prompt_gives_the_same_bits_whatever_is_staged(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine.programs.shapes_only():
        _compile_chunk(engine, CHUNK)
    compiled = set(engine.programs.compiled)
    staged, [stager] = read(engine, monkeypatch)
    # programs that were compiled from shapes are the ones that run
    assert {key[0] for key in set(engine.programs.compiled) - compiled} == {"head"}
    num_bytes, experts = stager.copied
    assert stager.asked == [(0, CHUNK), (1, CHUNK), (0, CHUNK), (1, CHUNK), (0, 9), (1, 9)]
    assert 3 * 6 < experts <= EXPERTS // 2 * 6  # more groups than blocks
    assert num_bytes == experts * engine.banks[0].blobs[0].nbytes
    assert all(buffer.is_deleted() for buffer in stager.buffers)
    assert engine.staging is not None
    assert engine.staging.num_tokens == 2 * CHUNK + 9
    used = engine.geometry.num_experts_used
    np.testing.assert_array_equal(engine.staging.uses.sum(axis=1), np.full(LAYERS, used * (2 * CHUNK + 9)))
    monkeypatch.setattr(staging, "choose_ahead", lambda *args: np.zeros(0, np.int64))
    late, [stager] = read(engine, monkeypatch)  # nothing before its block is routed
    assert 0 < stager.copied[1] <= experts
    np.testing.assert_array_equal(staged, late)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "plan", replace(engine.plan, staged_buckets=()))
        patch.setattr(engine, "programs", Programs(engine.programs.spec))
        alone, stagers = read(engine, monkeypatch)
    assert not stagers
    np.testing.assert_allclose(staged, alone, atol=2e-5)  # other programs
    monkeypatch.undo()
    monkeypatch.setattr(sizes, "IN_PLACE_BYTES", 0)
    wrong, _ = read(engine, monkeypatch, Nothing())
    assert np.abs(wrong - alone).max() > 2e-3  # the copies are what is read


def test_a_block_that_misses_little_reads_it_where_it_lies_and_waits_for_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, [stager] = read(engine, monkeypatch)
    assert stager.copied[1] > 0

    def waited(stager: Stager, array: Any) -> np.ndarray:
        raise AssertionError("waited for the routing")

    monkeypatch.setattr(sizes, "IN_PLACE_BYTES", 2**40)
    monkeypatch.setattr(Stager, "_wait_for", waited)
    for key in [key for key in engine.programs.compiled if key[0] == "experts in place"]:
        del engine.programs.compiled[key]
    with engine.programs.shapes_only():
        _compile_chunk(engine, CHUNK)
    compiled = set(engine.programs.compiled)
    in_place, [stager] = read(engine, monkeypatch)
    assert set(engine.programs.compiled) - compiled <= {("head", 1)}
    assert stager.copied == (0, 0)
    np.testing.assert_array_equal(in_place, staged)


def test_how_a_block_gets_its_experts_is_decided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "IN_PLACE_BYTES", 1)
    stager, buffers = by_hand(Log([]), [0, 0, 0])
    stager.staging.num_tokens, stager.staging.uses[1] = 50, 50
    for _ in stager.groups(0, CHUNK, routed([]), (1, CHUNK)):
        stager.started(Result(1))
    stager.staging.uses[1], stager.staging.num_tokens = 0, 10**9  # counted since: now it would miss nothing
    got = []
    for staged in stager.groups(1, CHUNK, routed(range(EXPERTS)), None):
        assert any(staged.words is buffer for buffer in buffers)
        got += np.flatnonzero(staged.lines >= 0).tolist()
        stager.started(Result(1))
    assert got == list(range(EXPERTS))
    stager.close()


def test_a_block_that_reads_in_place_leaves_the_buffers_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block between two that have experts copied: no buffer waits for its program, and copies go on beside it."""
    monkeypatch.setattr(sizes, "IN_PLACE_BYTES", 1)
    log: list[str] = []
    stager, buffers = by_hand(Log(log), [10, 0, 4])
    stager.staging.num_tokens, stager.staging.uses[[0, 2]] = 10**9, 10**9
    for layer, following in ((0, (1, CHUNK)), (1, (2, CHUNK)), (2, None)):
        if stager.in_place(layer, CHUNK):
            log.append(f"program {layer} of the bank")
        for staged in stager.groups(layer, CHUNK, routed(range(EXPERTS)), following):
            [buffer] = [i for i, array in enumerate(buffers) if array is staged.words]
            log.append(f"program {layer} of {buffer}")
            stager.started(Result(4))
    assert log == [
        "copy to 0", "arrived in 0", "program 0 of 0", "program 1 of the bank", "copy to 1", "copy to 0",
        "arrived in 1", "program 2 of 1", "arrived in 0", "program 2 of 0",
    ]  # fmt: skip
    assert stager.copied[1] == 3 * 6
    stager.close()


def test_an_expert_that_never_comes_stops_the_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for = Stager._wait_for

    def forgetful(stager: Stager, array: Any) -> np.ndarray:
        uses = wait_for(stager, array).copy()
        missing = ~engine.residency.resident(0) & (uses > 0)
        uses[np.flatnonzero(missing)[0]] = 0
        return uses

    monkeypatch.setattr(Stager, "_wait_for", forgetful)
    monkeypatch.setattr(staging, "choose_ahead", lambda *args: np.zeros(0, np.int64))
    with pytest.raises(RuntimeError, match="2 experts that a chunk asked for were not copied"):
        read(engine, monkeypatch)
    assert isinstance(engine.owner, Session)
    with pytest.raises(RuntimeError, match="cannot go on: a chunk was broken off after 0 tokens"):
        engine.owner.last_logits()


def test_any_experts_may_be_staged(engine: Engine) -> None:
    """One block: subsets in a buffer, also of experts that are resident, and of none; neighbours are overwritten."""
    bank, rng = engine.banks[0], np.random.default_rng(1)
    layout, g = bank.layout, engine.geometry
    assert isinstance(layout, ExpertLayout)
    u = jnp.asarray(rng.standard_normal((CHUNK, g.embed_width), np.float32))
    order = np.stack([rng.permutation(EXPERTS)[: g.num_experts_used] for _ in range(CHUNK)])
    ids = jnp.asarray(np.sort(order), jnp.int32)
    weights = jnp.full(ids.shape, 1 / g.num_experts_used, jnp.float32)
    pages, words = engine.tables.expert_pages(0), np.asarray(bank.blobs)
    each = expert_lines(words[0].nbytes)

    @jax.jit
    def run(buffer: jax.Array, lines: jax.Array) -> jax.Array:
        rows = expert_kernels.start_rows(u, ids, engine.arrays, pages, layout)
        rows = expert_kernels.add_rows(rows, u, buffer, lines, layout)
        rows = expert_kernels.add_rows(rows, u, bank.blobs, jnp.arange(EXPERTS), layout)
        return expert_kernels.sum_rows(rows, weights)

    in_place = expert_kernels.sum_rows(
        expert_kernels.start_rows(u, ids, engine.arrays, pages, layout, bank.blobs), weights
    )

    expected = np.asarray(in_place)
    for subset in ([], [EXPERTS - 1], [1, 9, 12], list(range(EXPERTS))):
        buffer = np.full((EXPERTS * each, 128), 0xFFFFFFFF, np.uint32)
        lines = np.full(EXPERTS, -1, np.int32)
        for place, expert in enumerate(rng.permutation(subset).astype(int)):
            lines[expert] = place * each
            buffer[place * each : (place + 1) * each].reshape(-1)[: words.shape[1]] = words[expert]
        found = np.asarray(run(buffer, lines))
        assert found.any()
        np.testing.assert_array_equal(found, expected)


def test_short_chunks_of_a_prompt_are_computed_by_the_kernels_for_chunks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    u = jnp.zeros((5, engine.geometry.embed_width))
    for name in ("window", "chunk"):
        monkeypatch.setattr(expert_kernels, name, lambda *_, name=name: called.append(name) or u)
    banks: list[LayerBank] = []

    def gdn_chunk(kind: int, weights: Any, bank: LayerBank, *args: Any) -> Any:
        banks.append(bank)
        raise RuntimeError("far enough")

    monkeypatch.setattr(engine.programs, "gdn_chunk", gdn_chunk)
    with pytest.raises(RuntimeError, match="far enough"):
        Session(engine).prefill(engine.file.topic_tokens(0, 5))
    where = engine.tables.expert_pages(0)
    experts = engine.weights.blocks[0].whole().experts
    for bank in (*banks, engine.banks[0]):
        jax.eval_shape(lambda b=bank: mixture(u, experts, b, engine.arrays, where, jnp.int32(5), engine.geometry))
    assert called == ["chunk", "window"]


# The order of copies and programs, with both made by hand


class Log(CopiesAtOnce):
    """Copies that arrive when they are told to."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.under_way, self.polls = log, set[int](), 0

    def start(self, number: int, runs: Any) -> None:
        assert number not in self.under_way
        self.under_way.add(number)
        self.log.append(f"copy to {number}")

    def done(self, number: int) -> bool:
        self.polls += 1
        if self.polls % 3 == 0:  # programs that run meanwhile end at the second look
            self.under_way.discard(number)
        return number not in self.under_way

    def wait(self, number: int) -> None:
        self.under_way.discard(number)
        self.log.append(f"arrived in {number}")


class Result:
    """A program's result, ready after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_ready(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def block_until_ready(self) -> Result:
        self.looks = 0
        return self


class Uses(Result):
    """What a block's routing says, there after some looks."""

    def __init__(self, uses: np.ndarray, looks: int) -> None:
        super().__init__(looks)
        self.uses = uses

    def copy_to_host_async(self) -> None:
        return

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        assert self.looks <= 0
        return self.uses


def routed(experts: Any, looks: int = 3) -> Any:
    return Uses(np.isin(np.arange(EXPERTS), experts).astype(np.int32), looks)


def by_hand(copies: Log, here: list[int]) -> tuple[Stager, tuple[jax.Array, ...]]:
    """A stager of three blocks of which the first experts are resident, and its buffers of 6 experts."""
    model: Any = SimpleNamespace(
        geometry=SimpleNamespace(num_experts=EXPERTS, num_experts_used=4),
        residency=SimpleNamespace(resident=lambda layer: np.arange(EXPERTS) < here[layer]),
        banks=[LayerBank(jnp.zeros((EXPERTS, 128), jnp.uint32), None, 1)] * 3,
    )
    buffers = tuple(jnp.zeros((6, 128), jnp.uint32) for _ in range(2))
    return Stager(model, Staging(copies, dict.fromkeys(range(3), 0), np.zeros((3, EXPERTS))), buffers), buffers


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        # programs are shorter than copies: the next copies start before the last ones have arrived
        (2, ["copy to 0", "copy to 1", "arrived in 0", "program 0.0", "copy to 0", "arrived in 1", "program 0.1",
             "copy to 1", "arrived in 0", "program 0.2", "copy to 0", "arrived in 1", "program 1.0",
             "copy to 1", "arrived in 0", "program 2.0", "copy to 0", "arrived in 1", "program 2.1",
             "arrived in 0", "program 2.2"]),
        # longer: a program is queued behind the running one before the next copies may start
        (9, ["copy to 0", "copy to 1", "arrived in 0", "program 0.0", "arrived in 1", "program 0.1",
             "copy to 0", "arrived in 0", "program 0.2", "copy to 1", "arrived in 1", "program 1.0",
             "copy to 0", "arrived in 0", "program 2.0", "copy to 1", "arrived in 1", "program 2.1",
             "copy to 0", "arrived in 0", "program 2.2"]),
    ],
)  # fmt: skip
def test_copies_wait_for_the_program_that_reads_their_buffer_and_programs_for_their_copies(
    looks: int, expected: list[str]
) -> None:
    """Three blocks that miss 16, 6 and 16 experts, buffers of 6."""
    log: list[str] = []
    here = [0, 10, 0]
    copies = Log(log)
    stager, buffers = by_hand(copies, here)
    for layer, following in ((0, (1, CHUNK)), (1, (2, CHUNK)), (2, None)):
        computed: list[int] = []
        for number, staged in enumerate(stager.groups(layer, CHUNK, routed(range(EXPERTS)), following)):
            [buffer] = [i for i, array in enumerate(buffers) if array is staged.words]
            assert buffer not in copies.under_way
            experts = np.flatnonzero(staged.lines >= 0)
            assert staged.lines[experts].tolist() == list(range(len(experts)))
            computed += experts.tolist()
            log.append(f"program {layer}.{number}")
            stager.started(Result(looks))
        assert computed == list(range(here[layer], EXPERTS))
    assert log == expected
    assert stager.copied == (38 * 512, 38)
    stager.close()
    assert not copies.under_way
    assert all(buffer.is_deleted() for buffer in buffers)


def test_what_is_copied_is_what_the_routing_asks_for_and_is_not_there() -> None:
    copies = Log([])
    stager, _ = by_hand(copies, [2, 0, 0])
    stager.staging.num_tokens = 50
    stager.staging.uses[0, 2:14] = stager.staging.uses[1, 3:9] = 50
    got: list[list[int]] = []

    def compute(layer: int, uses: Any, following: tuple[int, int] | None) -> None:
        for staged in stager.groups(layer, CHUNK, uses, following):
            got.append(np.flatnonzero(staged.lines >= 0).tolist())
            stager.started(Result(1))

    compute(0, routed([0, 1, 2, 3, 15], looks=0), (1, CHUNK))
    assert got == [[2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13], [15]]  # both guesses were under way
    got.clear()
    compute(1, routed([3, 4, 8, 9, 10]), (2, CHUNK))
    assert got == [[3, 4, 5, 6, 7, 8], [9, 10]]
    got.clear()
    compute(2, routed([]), None)  # nobody has used any of these, so none was copied ahead
    assert got == []
    assert stager.copied[1] == 12 + 1 + 6 + 2
    stager.close()


def test_buffers_are_freed_when_a_prompt_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Log([])
    engine.staging = replace(Staging.of(engine.banks), copies=copies)
    with suppress(RuntimeError), staged_prompt(engine, [CHUNK]) as stager:
        assert stager is not None
        next(stager.groups(0, CHUNK, routed(range(EXPERTS)), None))
        assert copies.under_way == {1}
        raise RuntimeError("failed")
    assert stager is not None
    assert all(buffer.is_deleted() for buffer in stager.buffers)
    assert not copies.under_way
    monkeypatch.setattr(engine, "plan", replace(engine.plan, staged_buckets=()))
    with staged_prompt(engine, [CHUNK]) as stager:  # no program takes staged experts
        assert stager is None


def test_a_bank_without_an_address_is_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(array: jax.Array) -> int:
        raise RuntimeError("UNIMPLEMENTED: no pointer")

    monkeypatch.setattr(staging, "address", nowhere)
    with pytest.raises(
        ConfigError, match=r"where the bank lies \(UNIMPLEMENTED: no pointer\).* Set prefill.stage_mib=0"
    ):
        Staging.of(engine.banks)


def test_neighbours_are_copied_together_in_pieces_that_let_others_pass() -> None:
    experts = np.array([2, 3, 4, 9])
    whole = 3 * LINE_BYTES
    runs = list(copy_runs(experts, 1000, 50_000, whole))
    assert runs == [(1000, 50_000 + 2 * whole, 3 * whole), (1000 + 3 * whole, 50_000 + 9 * whole, whole)]
    odd = list(copy_runs(experts, 0, 0, whole - 4))  # a blob that ends inside a line: every expert by itself
    assert odd == [(i * whole, e * (whole - 4), whole - 4) for i, e in enumerate([2, 3, 4, 9])]
    large = MAX_COPY_BYTES // 2 + LINE_BYTES
    pieces = list(copy_runs(experts[:3], 0, 0, large))
    assert [size for *_, size in pieces] == [MAX_COPY_BYTES, 3 * large - MAX_COPY_BYTES]
    assert pieces[1] == (MAX_COPY_BYTES, 2 * large + MAX_COPY_BYTES, 3 * large - MAX_COPY_BYTES)


# The driver


class FakeCuda:
    """The driver's functions as they are called: copies are made when their event is waited for."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.queued, self.events, self.current = failing, list[tuple[int, int, int]](), 0, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            return 2 if name == self.failing else getattr(self, f"_{name}")(*args) or 0

        return call

    def _cuInit(self, flags: Any) -> None:
        assert flags.value == 0

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> None:
        device._obj.value = 7 + ordinal.value

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = 100 + device.value

    def _cuCtxPushCurrent_v2(self, context: Any) -> None:
        assert context.value == 108
        self.current += 1

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.current -= 1

    def _cuStreamCreate(self, stream: Any, flags: Any) -> None:
        assert (self.current, flags.value) == (1, 1)
        stream._obj.value = 55

    def _cuEventCreate(self, event: Any, flags: Any) -> None:
        assert (self.current, flags.value) == (1, 2)
        self.events += 1
        event._obj.value = self.events

    def _cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:
        assert (self.current, stream.value) == (1, 55)
        self.queued.append((target.value, source.value, size.value))

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        assert (self.current, stream.value) == (1, 55)

    def _cuEventQuery(self, event: Any) -> int:
        return 600 if self.queued else 0

    def _cuEventSynchronize(self, event: Any) -> None:
        assert event.value in range(1, self.events + 1)
        for run in self.queued:
            ctypes.memmove(*run)
        self.queued.clear()

    def _cuGetErrorName(self, result: Any, text: Any) -> None:
        text._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"


def test_the_driver_copies_to_places_of_an_array() -> None:
    source, target = jnp.arange(64, dtype=jnp.uint32), jnp.zeros(64, jnp.uint32).block_until_ready()
    copies = CudaCopies(FakeCuda(), 1)
    assert copies.done(0)  # nothing was started
    copies.wait(0)
    copies.start(0, [(address(target) + 8, address(source) + 40, 12)])
    assert not copies.done(0)
    copies.wait(0)
    assert copies.done(0)
    assert np.asarray(target).tolist() == [0, 0, 10, 11, 12] + [0] * 59
    copies.start(1, [])
    assert (copies.cuda.events, copies.cuda.current) == (2, 0)


@pytest.mark.parametrize("name", ["cuDeviceGet", "cuStreamCreate", "cuMemcpyHtoDAsync_v2"])
def test_what_the_driver_refuses_is_named(name: str) -> None:
    cuda = FakeCuda(failing=name)
    with pytest.raises(RuntimeError, match=rf"{name} failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        CudaCopies(cuda, 1).start(0, [(0, 0, 4)])
    assert cuda.current == 0
