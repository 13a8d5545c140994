"""What a plan says of itself beside its numbers. Pure."""

from __future__ import annotations

from strata_jax.memory import layout
from strata_jax.memory.candidate import Frame
from strata_jax.memory.cell_window import window_note
from strata_jax.memory.ledger import MIB, Origin
from strata_jax.memory.pieces import Pieces
from strata_jax.memory.request import Choice, setting_text
from strata_jax.memory.staging import MIN_MEAN_ROWS, NUM_BUFFERS, expert_lines


def plan_notes(frame: Frame, context: Choice, chunk: Choice, slots: Choice, pieces: Pieces) -> tuple[str, ...]:
    notes = [f"{c.key}={c.value:,}: {c.reason}" for c in (context, chunk, slots) if c.origin is not Origin.GIVEN]
    if frame.page_choice.origin is not Origin.GIVEN:
        notes.append(f"page of {frame.page_bytes:,} bytes: {frame.page_choice.reason}")
    else:
        blobs = frame.sizes.blobs[: len(frame.pages)]
        waste = 100 * layout.slot_waste_frac(blobs, frame.page_bytes)
        notes.append(f"page of {frame.page_bytes:,} bytes, given: {waste:.2f} % of the slots is waste")
    if chunk.value > frame.num_cells(context.value):
        notes.append(
            f"prefill.chunk={chunk.value:,} is more than the context of {context.value:,} cells: its buffers are never"
            " filled"
        )
    padded = layout.padded_chunk(chunk.value)
    if padded != chunk.value:
        notes.append(f"chunks of {chunk.value:,} tokens run in a program of {padded:,} rows")
    if frame.num_cells(context.value) != context.value:
        cells = frame.num_cells(context.value)
        notes.append(f"the context is rounded up to {cells:,} cells, whole blocks of {frame.block_cells}")
    notes += _stage_notes(frame, context.value, chunk.value)
    if pieces.lent_slots:
        lent = f"{pieces.lent_slots:,} of {slots.value:,} slots ({pieces.lent_bytes / MIB:,.1f} MiB)"
        notes.append(f"a chunk of {chunk.value:,} tokens borrows {lent} in {pieces.bucket_segments[-1]} segments")
    elif frame.request.moving.lend:
        notes.append("spare device memory pays for the prompt buffers: nothing is lent")
    if frame.request.moving.elastic_bytes:
        notes.append(_elastic_note(pieces))
    wanted = frame.first_cells(context.value)
    if frame.request.moving.grow_init_cells is not None and pieces.mapped_cells > wanted:
        notes.append(
            f"{pieces.mapped_cells:,} K/V cells are mapped at the start instead of {wanted:,}: the slots above the"
            f" floor of {frame.request.moving.floor_slots:,} cannot pay for more"
        )
    window = window_note(frame, context.value, pieces.mapped_cells)
    notes += [window] if window is not None else []
    ranking = frame.request.ranking
    if ranking is not None:
        ranked = f"{frame.max_slots:,} of {len(frame.order.expert):,} experts ranked"
        text = f"slots follow cache.profile={ranking.file}: {ranked}, digest {ranking.digest[:12]}"
        if frame.with_draft and not ranking.with_draft:
            text += "; it leaves out the draft block, whose experts get as many slots as a layer has on average"
        notes.append(text)
    if frame.request.spec_window > 1 and not frame.with_draft:
        notes.append("the model has no draft block: it decodes token by token")
    if frame.sizes.table_bytes:
        notes.append(
            f"the n-gram table ({frame.sizes.table_bytes / MIB:,.1f} MiB) stays in the memory-mapped file;"
            f" a token reads {frame.sizes.table_row_bytes:,} bytes of it"
        )
    return tuple(notes)


def _stage_notes(frame: Frame, context_cells: int, chunk_tokens: int) -> list[str]:
    need, stage_bytes = frame.stage_need, frame.stage_bytes(context_cells, chunk_tokens)
    least = -(-MIN_MEAN_ROWS // need.mean_rows)
    if frame.request.stage_bytes and not stage_bytes:
        given = setting_text("stage_bytes", frame.request.stage_bytes)
        return [f"{given} has no use: chunks of {chunk_tokens:,} tokens need too few experts, {least:,.0f} do not"]
    if not stage_bytes:
        return []
    each = stage_bytes // NUM_BUFFERS
    experts = expert_lines(each) // expert_lines(need.expert_bytes)
    return [
        f"missing experts are copied ahead of chunks of {least:,.0f} tokens or more through {NUM_BUFFERS} buffers of"
        f" {each / MIB:,.1f} MiB, {experts:,} experts each"
    ]


def _elastic_note(pieces: Pieces) -> str:
    if pieces.givable_bytes:
        return f"{pieces.givable_bytes / MIB:,.1f} MiB of the expert cache can be given back, in segments"
    return (
        "no part of the expert cache can be given back: its segments have no more than the loan. Set another"
        " policy.vram_elastic.segment_mib, more cache.slots or a smaller prefill.chunk"
    )
