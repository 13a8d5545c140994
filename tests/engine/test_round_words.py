"""Words of a round: both ways, and that nothing else goes between host and device in a round."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from strata_jax.engine import rounds
from strata_jax.engine.experts import ExpertCounts
from strata_jax.engine.host_copies import address
from strata_jax.engine.mailbox import Mailbox
from strata_jax.engine.round_words import Lookups, Report, WindowForm, asked, read_report, report_words
from strata_jax.engine.round_words import window_words as words_of
from strata_jax.engine.session import Session
from tests.engine.conftest import LoadEngine
from tests.oracle.models import ModelStore


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("min_p", [0.0, 0.3, 1e-30])
def test_a_window_arrives_as_it_was_packed(num_rows: int, min_p: float) -> None:
    words = words_of([7, 2**31 - 1], [5], 123_456, min_p, num_rows)
    form = WindowForm(num_rows)
    assert words.shape == (3 + 2 * num_rows,) == (form.num_words,)
    window = jax.jit(partial(asked, form=form))(words)
    rest = num_rows - 2
    assert window.tokens.tolist() == [7, 2**31 - 1, *[0] * rest]
    assert window.forced.tolist() == [5, -1, *[-1] * rest]
    assert (int(window.num_real), int(window.start)) == (2, 123_456)
    assert float(window.min_p) == np.float32(min_p)


def test_no_words_are_no_tokens() -> None:
    form = WindowForm(3, 2)
    assert int(asked(jnp.zeros(form.num_words, jnp.int32), form).num_real) == 0


@pytest.mark.parametrize(("kept", "good"), [(1, 0), (2, 3), (4, 1)])
def test_a_report_is_read_as_it_was_written(kept: int, good: int) -> None:
    counts = ExpertCounts(jnp.int32(80), jnp.int32(33))
    words = jax.jit(report_words)(jnp.arange(10, 14), jnp.int32(kept), jnp.arange(20, 23), jnp.int32(good), counts)
    expected = Report((10, 11, 12, 13)[:kept], [20, 21, 22][:good], Lookups(80, 33))
    assert read_report(words, 4) == expected


def test_a_round_finds_its_words_in_host_memory_and_leaves_its_report_there(
    models: ModelStore, load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(models.synthetic("nano", 0, echo_mtp=0.1), spec_window=2)
    monkeypatch.setattr(engine, "mailbox", Mailbox())  # other tests have used this engine's
    session, reports, windows = Session(engine), list[str](), list[int]()
    copied, given = list[tuple[int, ...]](), list[list[tuple[tuple[int, ...], int]]]()
    logits = session.prefill(list(range(40)))
    call, put = engine.programs._call, jax.device_put

    def called(key: tuple, f: object, args: tuple, *how: object) -> object:
        if key[0] in ("decode", "decode end"):
            leaves = jax.tree.leaves(args)
            assert all(isinstance(leaf, jax.Array) for leaf in leaves)
            host = [leaf for leaf in leaves if leaf.sharding.memory_kind == "pinned_host"]
            given.append([(leaf.shape, address(leaf)) for leaf in host])
            window = args[10] if key[0] == "decode" else args[8]
            windows.append(address(window))
        result: Any = call(key, f, args, *how)
        if key[0] == "decode end":
            reports.append(result[2].report.sharding.memory_kind)
        return result

    def was_put(x: object, *where: object, **how: Any) -> object:
        copied.extend(leaf.shape for leaf in jax.tree.leaves(x) if isinstance(leaf, np.ndarray))
        return put(x, *where, **how)

    monkeypatch.setattr(rounds, "PART_BLOCKS", 2)
    monkeypatch.setattr(engine.programs, "_call", called)
    monkeypatch.setattr(jax, "device_put", was_put)
    list(islice(session.decode(logits, max_tokens=20), 4))
    rows = engine.ple_rows([], [0], 2)
    assert rows is not None
    box = (1 + 7 + rows.nbytes // 4,)
    num_parts = len(rounds.parts_of(engine.geometry.num_layers))
    assert num_parts > 1
    assert copied == [box]  # when the mailbox was made, in the first round
    assert len(given) == 3 * (num_parts + 1)
    first = given[0]
    assert [shape for shape, _ in first] == [box]
    assert given == [first, *[[]] * num_parts] * 3  # the same places in each round
    assert windows == [windows[0], *[windows[1]] * num_parts] * 3  # what the first part has read, for all others
    assert reports == ["pinned_host"] * 3
