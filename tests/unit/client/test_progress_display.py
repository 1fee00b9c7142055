"""What a user sees, from events alone."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import pytest

from h3stream.events import Event, Fragment, InitSegment, Progress, RefinedAudio, RefineFailed, RefineProgress
from h3stream.progress import Lines, LiveBar, Tally, bar_line
from h3stream.refine import RefineSpec
from h3stream.request import GenerateRequest
from tests.fakes import NOTICE, events_of, heartbeat, plan_of, refine_events_of

PLAN = plan_of(GenerateRequest("a fox"))
EVENTS = list(events_of(PLAN))
HEADLINE = "job job-0: 39 frames of 64x64 in 3 chunks, seed 0"


def tally_after(events: list[Event]) -> Tally:
    """The state after events that came a second apart."""
    tally = Tally()
    for second, event in enumerate(events):
        tally.add(event, float(second))
    return tally


def test_the_tally_starts_at_nothing_and_ends_at_everything() -> None:
    assert (Tally().fraction, Tally().describe(), Tally().summary()) == (0.0, "waiting", [])
    tally = tally_after(EVENTS)
    assert tally.fraction == 1.0
    assert (tally.num_frames_emitted, tally.num_frames) == (39, 39)
    first = next(event for event in EVENTS if isinstance(event, Fragment))
    num_bytes = sum(len(event.media) for event in EVENTS)
    assert tally.summary() == [
        f"first fragment after {first.seq:.1f} s; 17 of 39 frames were out before sampling ended",
        f"39 frames, 52000 samples, {num_bytes} bytes in 2 fragments; {float(len(EVENTS) - 1)} s in all",
        f"warning: {NOTICE}",
        "warning: 3 audio samples are at full scale",
    ]


def test_a_job_that_is_not_finished_has_no_summary() -> None:
    assert tally_after(EVENTS[:-1]).summary() == []


def test_the_fraction_never_falls() -> None:
    fractions = [tally_after(EVENTS[:count]).fraction for count in range(len(EVENTS) + 1)]
    assert fractions == sorted(fractions)
    sampled = next(i for i, e in enumerate(EVENTS) if isinstance(e, Progress) and (e.chunk_index, e.step) == (1, 1))
    assert fractions[sampled + 1] == pytest.approx((1 + 1 / 2) / 3)


DENSE_PLAN = plan_of(GenerateRequest("a fox", mode="dense"))
DENSE = list(events_of(DENSE_PLAN))


def test_a_dense_clip_is_counted_in_its_own_forwards_and_has_no_chunk_while_it_is_sampled() -> None:
    states = [tally_after(DENSE[:count]) for count in range(len(DENSE) + 1)]
    fractions = [tally.fraction for tally in states]
    assert fractions == sorted(fractions)
    sampled = [i for i, e in enumerate(DENSE) if isinstance(e, Progress)]
    assert [fractions[i + 1] for i in sampled] == pytest.approx([step / 5 for step in range(1, 6)])
    assert states[sampled[2] + 1].describe() == "denoise  step 3/5  0/39 frames"
    assert states[sampled[-1] + 2].describe() == "decode  chunk 0 of 0-2  0/39 frames"
    assert states[-1].notes[0] == "job job-0: 39 frames of 64x64 sampled at once, seed 0"
    assert states[-1].summary()[0].endswith("0 of 39 frames were out before sampling ended")


REFINED_PLAN = plan_of(GenerateRequest("a fox", refine_audio=RefineSpec(steps=4)))
REFINED = list(events_of(REFINED_PLAN))
REFINEMENT = list(refine_events_of(REFINED_PLAN, ()))


@pytest.mark.parametrize(("events", "has_clip"), [(REFINED, True), (REFINEMENT, False)])
def test_the_steps_of_a_refinement_are_work_too(events: list[Event], has_clip: bool) -> None:
    states = []
    for count in range(len(events) + 1):
        states.append(Tally(has_clip=has_clip))
        for event in events[:count]:
            states[-1].add(event, 0.0)
    fractions = [tally.fraction for tally in states]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    steps = [i for i, e in enumerate(events) if isinstance(e, RefineProgress)]
    num_forwards = 6 if has_clip else 0
    assert [fractions[i + 1] for i in steps] == pytest.approx(
        [(num_forwards + n) / (num_forwards + 4) for n in (1, 2, 3, 4)]
    )
    assert states[steps[1] + 1].describe().startswith("refine  step 2/4 cached")
    assert states[steps[-1] + 2].describe().startswith("decode")
    assert max(len(bar_line(tally, 40)) for tally in states) <= 40
    refined = "sound refined in 1.8 s, steps: 1 build, 3 cached"
    assert states[-1].summary().index(refined) == (2 if has_clip else 0)


def test_a_sound_that_was_not_refined_is_no_part_of_the_summary() -> None:
    failed = RefineFailed(seq=0, job_id="job-0", media_time_ticks=0, reason="OUT_OF_MEMORY", message="no room")
    tally = tally_after([e for e in REFINED if not isinstance(e, RefinedAudio)] + [failed])
    assert tally.refine_failure == failed
    assert tally.fraction == 1.0
    assert [line for line in tally.summary() if "refined" in line] == []


def test_each_warning_is_kept_once_whoever_gave_it() -> None:
    tally = tally_after([*EVENTS, *EVENTS[1:]])
    assert tally.warnings == [NOTICE, "3 audio samples are at full scale"]
    assert tally.notes == [HEADLINE, f"warning: {NOTICE}", "warning: 3 audio samples are at full scale"]


def test_a_queued_job_says_how_many_are_ahead() -> None:
    queued = replace(heartbeat(1, PLAN, "job-0"), phase="queued", chunk_index=-1, queue_position=2)
    assert tally_after([EVENTS[0], queued]).describe() == "queued  behind 2 jobs  0/39 frames"
    assert tally_after([EVENTS[0], replace(queued, queue_position=1)]).describe().startswith("queued  behind 1 job  ")


def test_who_joins_late_is_told_of_what_has_come_from_then_on() -> None:
    init, _, last = [event for event in EVENTS if event.media]
    joined = [EVENTS[0], init, *EVENTS[last.seq :]]
    assert tally_after(joined).summary()[:2] == [
        "first fragment after 2.0 s; joined at frame 17: the clip begins there",
        f"22 frames, {len(init.media + last.media)} bytes in 1 fragments; {float(len(joined) - 1)} s in all",
    ]


def test_a_place_in_the_queue_is_a_line_whenever_it_changes() -> None:
    stream = io.StringIO()
    lines, tally = Lines(stream), Tally()
    beat = replace(heartbeat(1, PLAN, "job-0"), phase="queued", chunk_index=-1)
    for position in (3, 3, 2, 2, 1, 0):
        event = replace(beat, queue_position=position)
        tally.add(event, 1.0)
        lines.show(tally, event, 1.0)
    assert stream.getvalue().splitlines() == [
        f"    1.0 s  queued  behind {ahead}" for ahead in ("3 jobs", "2 jobs", "1 job")
    ]


def test_a_note_has_a_line_of_its_own() -> None:
    stream = io.StringIO()
    bar, tally = LiveBar(stream, lambda: 80), tally_after(EVENTS[:3])
    bar.show(tally, EVENTS[2], 1.0)
    bar.note("connection lost")
    assert stream.getvalue().endswith("\r\x1b[Kconnection lost\n")
    stream = io.StringIO()
    Lines(stream).note("connection lost")
    assert stream.getvalue() == "connection lost\n"


def longest_state() -> Tally:
    tally = tally_after(EVENTS)
    tally.stream = None
    tally.phase, tally.chunk_index, tally.num_chunks, tally.step, tally.num_steps = "denoise", 21, 22, 99, 100
    tally.num_frames_emitted, tally.num_frames, tally.first_fragment_s = 357, 362, 1234.5
    return tally


@pytest.mark.parametrize("columns", [20, 40, 79, 120])
def test_a_line_fits_its_terminal(columns: int) -> None:
    states = [*(tally_after(EVENTS[:count]) for count in range(len(EVENTS) + 1)), longest_state()]
    assert max(len(bar_line(tally, columns)) for tally in states) <= columns


def test_eighty_columns_hold_a_bar_and_every_word() -> None:
    line = bar_line(tally_after(EVENTS[:14]), 79)
    assert line.startswith("[##")
    assert line.endswith("first at 11.0 s") or "frames" in line
    assert bar_line(longest_state(), 79).endswith(
        "denoise  chunk 21 of 0-21  step 99/100  357/362 frames  first at 1234.5 s"
    )


def test_the_bar_redraws_one_line_and_keeps_notes_above_it() -> None:
    stream = io.StringIO()
    bar, tally = LiveBar(stream, lambda: 80), Tally()
    for event in EVENTS:
        tally.add(event, 1.0)
        bar.show(tally, event, 1.0)
    bar.close()
    headline, notice, warning, last, rest = stream.getvalue().split("\n")
    assert headline == f"\r\x1b[K{HEADLINE}"
    assert notice == f"\r\x1b[K\x1b[1;33mwarning: {NOTICE}\x1b[0m"
    assert warning.endswith("\x1b[1;33mwarning: 3 audio samples are at full scale\x1b[0m")
    assert last.startswith("\r[##")
    assert rest == ""


def test_plain_lines_carry_no_control_characters_and_no_heartbeats() -> None:
    stream = io.StringIO()
    lines, tally = Lines(stream), Tally()
    beats = [heartbeat(0, PLAN, "job-0")] * 3
    for event in itertools.chain(EVENTS[:3], beats, EVENTS[3:]):
        tally.add(event, 1.5)
        lines.show(tally, event, 1.5)
    lines.close()
    text = stream.getvalue()
    assert all(character == "\n" or character.isprintable() for character in text)
    shown = text.splitlines()
    assert shown[:3] == [HEADLINE, f"warning: {NOTICE}", "    1.5 s  encode  0/39 frames"]
    assert len(shown) == 3 + 2 * 3 + 1  # two phases of three chunks, and the warning at the end


def test_only_media_events_carry_media() -> None:
    for event in EVENTS:
        assert bool(event.media) == isinstance(event, InitSegment | Fragment)
