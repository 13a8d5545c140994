"""pipeline=generate: what a run prints, streams and leaves behind, also when it fails or is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from strata_jax.engine.session import Session
from strata_jax.engine.text_stream import TextStream
from strata_jax.errors import ConfigError, FormatError
from strata_jax.gguf.reader import open_gguf
from strata_jax.gguf.tokenizer import Tokenizer
from strata_jax.report.summary import FIELDS
from tests.engine.conftest import load
from tests.pipelines.conftest import REPOSITORY, Finished

RunHere = Callable[..., Finished]
PROMPT_IDS = [11, 204, 33, 480, 7, 7, 92, 310, 41, 5]
COMMON = ("prefill.chunk=64", "model.max_context=256", "kv.type=f32", "spec.window=2")
PROMPT = f"workload.token_ids=[{','.join(map(str, PROMPT_IDS))}]"
OUTPUT = "workload.max_output_tokens=24"
# A shell's background job ignores SIGINT, and so does what it starts; run what follows with the default again.
INTERRUPTIBLE = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def ids(tokens: list[int]) -> str:
    return "[" + ",".join(map(str, tokens)) + "]"


@pytest.fixture
def generate(run_here: RunHere, small_model: Path) -> RunHere:
    """Run the small model in this process."""
    return lambda *arguments, **options: run_here(f"model.path={small_model}", *COMMON, *arguments, **options)


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(small_model).metadata)


@pytest.fixture(scope="module")
def greedy(small_model: Path) -> list[int]:
    """24 tokens after `PROMPT_IDS`, by the engine alone and without drafts."""
    session = Session(load(small_model, context_cells=256, chunk_tokens=64))
    rounds = session.decode(session.prefill(PROMPT_IDS), max_tokens=24, draft=False)
    return [token for r in rounds for token in r.emitted]


def shown(tokens: list[int], tokenizer: Tokenizer) -> str:
    stream = TextStream(tokenizer.token_bytes)
    return "".join(stream.push(token) for token in tokens) + stream.finish()


def test_run_without_arguments_plans_streams_and_leaves_a_whole_record(
    command_line: Callable[..., Finished],
) -> None:
    run = command_line()
    assert run.code == 0, run.err
    plan_text = (run.directory / "plan.txt").read_text(encoding="utf-8")
    texts = [run.text(f"{name}.0") for name in ("warm_question", "first", "measured")]
    assert all(texts)
    places = [run.out.index(plan_text.strip()), *(run.out.index(text) for text in texts), run.out.index("num_requests")]
    assert places == sorted(places), "plan, then the texts in order, then the result"

    summary = run.summary
    assert list(summary) == ["schema_version", *FIELDS]
    assert (summary["status"], summary["error"], summary["num_requests"]) == ("ok", None, 3)
    requests, chunks, rounds = (run.lines("metrics.jsonl", kind) for kind in ("request", "chunk", "round"))
    assert [r["request"] for r in requests] == ["warm_question.0", "first.0", "measured.0"]
    assert summary["prompt_tokens"] == summary["fresh_tokens"] == sum(c["num_tokens"] for c in chunks) > 1000
    assert summary["reused_tokens"] == 0
    assert (
        summary["output_tokens"] == sum(len(r["emitted"]) for r in rounds) == sum(r["output_tokens"] for r in requests)
    )
    assert 0 < summary["draft_accepted_tokens"] < summary["draft_tokens"]
    assert 0 < summary["hit_rate"] < 1
    for key in ("ttft_ms", "prompt_tok_s", "decode_tok_s", "compile_s", "load_s", "first_run_s", "peak_ram_bytes"):
        assert summary[key] > 0, key
    assert summary["median_run_s"] is None
    assert summary["first_run_s"] + summary["compile_s"] + summary["load_s"] < summary["wall_s"]

    plan = json.loads((run.directory / "plan.json").read_text(encoding="utf-8"))
    assert plan["fits"] is True
    loaded = {line["owner"]: line["bytes"] for line in run.lines("events.jsonl", "load")}
    assert set(loaded) == {"weights", "bank", "arena"}
    planned = sum(e["bytes"]["start"] for e in plan["ledger"])
    assert sum(loaded.values()) == pytest.approx(planned, rel=0.05)
    compiled = run.lines("events.jsonl", "compile")
    assert len(compiled) == summary["num_compilations"]
    # naming a program and looking for it takes a few milliseconds more
    ms = sum(line["ms"] for line in compiled)
    assert ms == pytest.approx(1000 * summary["compile_s"], rel=0.01, abs=5 * len(compiled))
    environment = json.loads((run.directory / "environment.json").read_text(encoding="utf-8"))
    assert "jax" in json.dumps(environment)
    assert (run.directory / "run.log").exists()


def test_tokens_and_text_are_those_of_plain_decoding(
    generate: RunHere, greedy: list[int], tokenizer: Tokenizer
) -> None:
    run = generate(PROMPT, OUTPUT, "engine.check=true")
    assert run.emitted == greedy
    text = run.text("token_ids.0")
    assert text == shown(greedy, tokenizer)
    assert text in run.out
    (request,) = run.lines("metrics.jsonl", "request")
    assert (request["prompt_tokens"], request["output_tokens"], request["finish_reason"]) == (10, 24, "length")
    rounds = run.lines("metrics.jsonl", "round")
    assert request["rounds"] == len(rounds) < 24
    assert request["draft_tokens"] == sum(r["window_tokens"] - 1 for r in rounds)
    assert request["draft_accepted_tokens"] == sum(len(r["emitted"]) - 1 for r in rounds) > 0
    (check,) = run.lines("events.jsonl", "check")
    assert check["found_bytes"] == pytest.approx(check["planned_bytes"], rel=0.01)


def test_a_prompt_text_and_the_same_message_in_a_file_are_one_request(generate: RunHere, tmp_path: Path) -> None:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps([{"role": "user", "content": "Count the blue boxes."}]), encoding="utf-8")
    by_prompt = generate('workload.prompt="Count the blue boxes."', OUTPUT, directory="prompt")
    by_file = generate(f"workload.messages_file={path}", OUTPUT, directory="messages")
    bare = generate(
        'workload.prompt="Count the blue boxes."', OUTPUT, "workload.apply_chat_template=false", directory="bare"
    )
    assert by_prompt.emitted == by_file.emitted != bare.emitted
    assert by_prompt.text("prompt.0") == by_file.text("messages.0")
    assert by_prompt.summary["prompt_tokens"] > bare.summary["prompt_tokens"]


def test_a_stop_text_ends_the_output_and_is_not_shown(
    generate: RunHere, greedy: list[int], tokenizer: Tokenizer
) -> None:
    pieces = [shown(greedy[:n], tokenizer) for n in range(25)]
    # the end of one token and the beginning of the next
    place = next(n for n in range(6, 20) if "�" not in pieces[n + 1][-4:] and len(pieces[n]) < len(pieces[n + 1]))
    border = len(pieces[place])
    stop = pieces[place + 1][border - 1 : border + 1]
    whole = pieces[-1]
    run = generate(PROMPT, OUTPUT, f"workload.stop={json.dumps([stop], ensure_ascii=False)}")
    assert run.text("token_ids.0") == whole[: whole.index(stop)]
    (request,) = run.lines("metrics.jsonl", "request")
    assert request["finish_reason"] == "stop"
    assert request["output_tokens"] <= place + 1


def test_forced_tokens_are_the_output_one_row_each(generate: RunHere, tokenizer: Tokenizer) -> None:
    forced = [70, 71, 300, 12, 99, 70, 1]
    run = generate(PROMPT, f"workload.forced_token_ids={ids(forced)}")
    rounds = run.lines("metrics.jsonl", "round")
    assert [r["window_tokens"] for r in rounds] == [1] * 7
    assert [r["position"] for r in rounds] == list(range(10, 17))
    assert run.text("token_ids.0") == shown(forced, tokenizer)
    assert (run.summary["output_tokens"], run.summary["draft_tokens"]) == (7, 0)


def test_repeated_requests_give_the_same_text_and_times_of_their_own(generate: RunHere) -> None:
    run = generate(PROMPT, OUTPUT, "workload.requests=3")
    assert run.text("token_ids.0") == run.text("token_ids.1") == run.text("token_ids.2")
    summary = run.summary
    assert (summary["num_runs"], summary["num_requests"], summary["prompt_tokens"]) == (3, 3, 30)
    assert summary["median_run_s"] > 0
    assert summary["first_run_s"] > 0


def test_sampling_settings_reach_the_sampler(generate: RunHere, greedy: list[int]) -> None:
    hot = (PROMPT, OUTPUT, "workload.temperature=2.0", "workload.top_p=0.99")
    one, same, other = (
        generate(*hot, f"workload.seed={seed}", directory=f"s{i}").emitted for i, seed in enumerate((1, 1, 2))
    )
    assert one == same != other
    assert greedy not in (one, other)
    assert generate(*hot, "workload.top_k=1", directory="k").emitted == greedy


# --- runs that do not end well


def test_a_truncated_file_is_refused_with_exit_code_2_and_a_record(
    small_model: Path, command_line: Callable[..., Finished], tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_model.read_bytes()[: small_model.stat().st_size // 2])
    run = command_line(f"model.path={cut}", PROMPT)
    assert run.code == 2
    assert run.err.startswith("error: ")
    assert "cut.gguf" in run.err
    assert "Traceback" not in run.err
    summary = run.summary
    assert summary["status"] == "failed"
    assert summary["error"] == {"type": FormatError.__name__, "message": run.err[len("error: ") : -1], "expected": True}
    assert summary["output_tokens"] is None


def test_token_ids_longer_than_the_context_are_refused_before_anything_is_loaded(
    small_model: Path, command_line: Callable[..., Finished]
) -> None:
    run = command_line(f"model.path={small_model}", f"workload.token_ids={ids([1] * 40)}", "model.max_context=32")
    assert run.code == 2
    assert "workload.token_ids has 40 ids and model.max_context=32" in run.err
    assert run.summary["status"] == "failed"
    assert run.summary["error"]["type"] == ConfigError.__name__
    assert not (run.directory / "events.jsonl").exists()


def test_a_text_and_its_output_longer_than_the_context_are_refused_with_what_they_need(
    generate: RunHere, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"model\.max_context=256 and the workload, which needs (\d+)") as refusal:
        generate(f'workload.prompt="{"blue boxes " * 20}"', "workload.max_output_tokens=200")
    needed = re.search(r"set model\.max_context=(\d+)", str(refusal.value))
    assert needed is not None
    assert 256 < int(needed[1]) < 500
    run = Finished(tmp_path / "run", "")
    assert (run.summary["status"], run.summary["error"]["expected"]) == ("failed", True)
    assert not (run.directory / "events.jsonl").exists()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_an_interrupted_run_leaves_what_it_had(small_model: Path, environment: dict[str, str], tmp_path: Path) -> None:
    forced = ids([70] * 3000)
    process = subprocess.Popen(
        [
            sys.executable, "-c", INTERRUPTIBLE, str(REPOSITORY / "run.py"), "hydra.run.dir=run",
            f"model.path={small_model}", "prefill.chunk=64", PROMPT, f"workload.forced_token_ids={forced}",
        ],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    piece = Tokenizer.from_gguf(open_gguf(small_model).metadata).token_bytes(70)
    _read_until(process.stdout, 5 * piece)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert b"Traceback" not in err
    run = Finished(tmp_path / "run", "")
    rounds = run.lines("metrics.jsonl", "round")
    assert 5 <= len(rounds) < 3000
    text = run.text("token_ids.0")
    assert len(rounds) - 1 <= len(text.encode()) // len(piece) <= len(rounds)
    assert run.summary["status"] == "interrupted"
    assert run.summary["error"]["type"] == "KeyboardInterrupt"
    assert (run.directory / "plan.json").exists()
    assert run.lines("events.jsonl", "compile")


def _read_until(stream: IO[bytes], wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        byte = stream.read(1)
        assert byte, f"the program ended before it showed {wanted!r}: {seen[-500:]!r}"
        seen += byte
