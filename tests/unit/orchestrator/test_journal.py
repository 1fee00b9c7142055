from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import pytest

from h3stream.errors import InvalidRequestError, PhaseError, StartupError
from orchestrator import journal as journals
from orchestrator.journal import JobRow, Journal


def row(job_id: str, **fields: object) -> JobRow:
    usual = JobRow(job_id, "ann", "queued", 2, "", "digest", 39, 1_700_000_000.25)
    return dataclasses.replace(usual, **fields)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Journal:
    return Journal(path)


def end(
    journal: Journal, job_id: str, *, ended_s: float = 5.0, stored_bytes: int = 30, artifact_bytes: int = 0
) -> None:
    journal.set_ended(job_id, "succeeded", ended_s, stored_bytes, artifact_bytes)


def names(rows: object) -> list[str]:
    return [found.job_id for found in rows]  # type: ignore[attr-defined]


def test_what_is_entered_is_there_for_the_next_that_opens_it_closed_or_not(journal: Journal, path: Path) -> None:
    journal.add(row("a", idempotency_key="key", priority=3))
    journal.add(row("b"))
    journal.set_running("a", 2)
    end(journal, "b", stored_bytes=30, artifact_bytes=20)
    expected = [
        row("a", idempotency_key="key", priority=3, state="running", num_resumes=2),
        row("b", state="succeeded", ended_s=5.0, stored_bytes=30, artifact_bytes=20),
    ]
    assert list(journal.rows()) == expected
    beside = Journal(path)
    assert list(beside.rows()) == expected, "as a killed server leaves it"
    beside.close()
    journal.close()
    assert list(path.parent.iterdir()) == [path], "all of it is in one file"
    assert path.stat().st_mode & 0o077 == 0
    reopened = Journal(path)
    assert list(reopened.rows()) == expected
    assert not reopened.was_damaged


def test_jobs_that_were_on_a_lane_come_before_those_that_wait(journal: Journal) -> None:
    for name in "abcd":
        journal.add(row(name))
    journal.set_running("d", 0)
    journal.set_running("b", 0)
    end(journal, "a")
    assert names(journal.live()) == ["b", "d", "c"]


def test_a_key_names_one_job_of_a_tenant_for_as_long_as_that_is_kept(journal: Journal) -> None:
    for name, tenant, key in (("a", "ann", "k"), ("b", "bob", "k"), ("c", "ann", ""), ("d", "ann", "")):
        journal.add(row(name, tenant=tenant, idempotency_key=key))
    assert journal.find_key("ann", "k") == row("a", idempotency_key="k")
    assert journal.find_key("bob", "k") == row("b", tenant="bob", idempotency_key="k")
    assert journal.find_key("ann", "other") is None
    assert journal.find_key("ann", "") is None, "jobs without a key have none in common"
    with pytest.raises(PhaseError, match="cannot be written: UNIQUE"):
        journal.add(row("e", idempotency_key="k"))
    journal.remove("a")
    journal.add(row("e", idempotency_key="k"))
    assert journal.find_key("ann", "k") == row("e", idempotency_key="k")


def test_pages_hold_every_job_once_newest_first_while_jobs_come_and_go(journal: Journal) -> None:
    for number in range(7):
        journal.add(row(f"{number}"))
    rows, token = journal.page(None, (), "", 3)
    assert names(rows) == ["6", "5", "4"]
    journal.add(row("7"))
    journal.remove("4")
    journal.remove("3")
    rows, token = journal.page(None, (), token, 2)
    assert names(rows) == ["2", "1"]
    rows, token = journal.page(None, (), token, 2)
    assert (names(rows), token) == (["0"], "")


def test_a_last_page_that_is_full_has_no_next(journal: Journal) -> None:
    journal.add(row("a"))
    assert journal.page(None, (), "", 1) == ([row("a")], "")
    assert journal.page("bob", (), "", 1) == ([], "")


def test_pages_hold_the_tenant_and_the_states_that_are_asked_for(journal: Journal) -> None:
    for number, (tenant, state) in enumerate([("ann", "q"), ("bob", "r"), ("ann", "r"), ("ann", "e"), ("bob", "e")]):
        name = f"{tenant}-{state}{number}"
        journal.add(row(name, tenant=tenant))
        if state == "r":
            journal.set_running(name, 0)
        elif state == "e":
            end(journal, name)
    assert names(journal.page("ann", (), "", 9)[0]) == ["ann-e3", "ann-r2", "ann-q0"]
    assert names(journal.page(None, ("running", "succeeded"), "", 9)[0]) == ["bob-e4", "ann-e3", "ann-r2", "bob-r1"]
    rows, token = journal.page("ann", ("running", "queued"), "", 1)
    assert names(rows) == ["ann-r2"]
    assert names(journal.page("ann", ("running", "queued"), token, 1)[0]) == ["ann-q0"]


@pytest.mark.parametrize("token", ["x", "AAAAAAAAAAKLLL5G", "ä", "====", "A" * 1000, "AAAAAAAAAAKLLL5F\n", "'; --"])
def test_a_token_that_is_none_is_refused(journal: Journal, token: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"page_token is .*; it must be the next_page_token") as refusal:
        journal.page(None, (), token, 1)
    assert [violation.field for violation in refusal.value.violations] == ["page_token"]


def test_sums_are_those_of_jobs_that_have_ended(journal: Journal, path: Path) -> None:
    for name, tenant in (("a", "ann"), ("b", "ann"), ("c", "bob"), ("d", "ann")):
        journal.add(row(name, tenant=tenant))
    end(journal, "a", stored_bytes=30, artifact_bytes=20)
    end(journal, "b", stored_bytes=7)
    end(journal, "c", stored_bytes=100, artifact_bytes=100)
    for opened in (journal, Journal(path)):
        assert [opened.stored_bytes(tenant) for tenant in ("ann", "bob", "eve")] == [37, 100, 0]
        assert opened.num_ended == {"ann": 2, "bob": 1}
        assert opened.artifact_bytes == {"ann": 20, "bob": 100}
    journal.set_stored_bytes("a", 10, 0)
    journal.remove("c")
    assert [journal.stored_bytes(tenant) for tenant in ("ann", "bob")] == [17, 0]
    assert journal.num_ended == {"ann": 2, "bob": 0}
    assert journal.artifact_bytes == {"ann": 0, "bob": 0}


def test_jobs_ended_in_the_order_in_which_they_did_whatever_the_clock_says(journal: Journal) -> None:
    for name, ended_s, artifact_bytes in (("a", 900.0, 0), ("c", 20.0, 5), ("b", 500.0, 5), ("d", 10.0, 0)):
        journal.add(row(name))
        end(journal, name, ended_s=ended_s, artifact_bytes=artifact_bytes)
    found = journal.oldest_ended(["ann"]), journal.oldest_with_artifacts(), journal.newest_with_artifacts()
    assert names(found) == ["a", "c", "b"]


def test_the_oldest_of_some_tenants_is_none_of_others(journal: Journal) -> None:
    for name, tenant, artifact_bytes in (("a", "ann", 0), ("b", "bob", 5), ("c", "eve", 5), ("d", "ann", 5)):
        journal.add(row(name, tenant=tenant))
        end(journal, name, artifact_bytes=artifact_bytes)
    assert names([journal.oldest_ended(["eve", "bob"]), journal.oldest_ended(["ann", "bob"])]) == ["b", "a"]
    found = journal.oldest_with_artifacts_of(["eve", "ann"]), journal.oldest_with_artifacts_of(["ann"])
    assert names(found) == ["c", "d"]
    assert journal.oldest_ended(["nobody"]) is None
    assert journal.oldest_ended([]) is None


def test_a_journal_of_version_1_goes_on(journal: Journal, path: Path) -> None:
    journal.add(row("a"))
    end(journal, "a", artifact_bytes=5)
    journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP INDEX ended_jobs_of_tenant")
        connection.execute("DROP INDEX jobs_with_artifacts_of_tenant")
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    for _ in range(2):
        changed = Journal(path)
        assert not changed.was_damaged
        assert names([changed.oldest_ended(["ann"])]) == ["a"]
        changed.close()


def _break_off(journal: Journal) -> None:
    with journal.at_once():
        journal.remove("b")
        end(journal, "a")
        raise ValueError("no")


def test_changes_that_belong_together_all_happen_or_none(journal: Journal, path: Path) -> None:
    journal.add(row("a"))
    with journal.at_once():
        journal.add(row("b"))
        end(journal, "b")
    with pytest.raises(ValueError, match="no"):
        _break_off(journal)
    for opened in (journal, Journal(path)):
        assert names(opened.live()) == ["a"]
        assert opened.num_ended == {"ann": 1}
        assert opened.stored_bytes("ann") == 30


def _fill(journal: Journal) -> None:
    for number in range(1000):
        journal.add(row(f"{number}"))


def test_a_disk_that_is_full_fails_the_change_and_nothing_else(journal: Journal, path: Path) -> None:
    journal.add(row("a"))
    connection = journal._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(PhaseError, match="the journal cannot be written: database or disk is full"):
        _fill(journal)
    entered = list(journal.rows())
    assert names(entered) == ["a", *map(str, range(len(entered) - 1))]
    journal.remove("0")
    journal.set_running("a", 0)
    connection.execute("PRAGMA max_page_count = 100000")
    journal.add(row("late"))
    assert len(list(Journal(path).rows())) == len(entered)


def test_a_loss_of_power_is_known_by_the_boot_until_it_has_been_dealt_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = path.with_name("boot_id")
    monkeypatch.setattr(journals, "_BOOT_ID_PATH", boot)
    boot.write_text("one\n")
    Journal(path).remember_boot()
    assert not Journal(path).has_lost_power
    boot.write_text("two\n")
    assert Journal(path).has_lost_power
    opened = Journal(path)
    assert opened.has_lost_power, "nobody has said that what it asks for is done"
    opened.remember_boot()
    assert not Journal(path).has_lost_power
    boot.unlink()
    assert Journal(path).has_lost_power, "it cannot be told"


def test_a_journal_that_is_new_may_follow_a_loss_of_power(journal: Journal) -> None:
    assert journal.has_lost_power


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\0" + bytes(84), bytes(4096)])
def test_a_file_that_is_no_journal_is_moved_aside(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    for number in (1, 2):
        path.write_bytes(content)
        journal = Journal(path)
        assert journal.was_damaged
        assert path.with_name(f"journal.db.damaged-{number}").read_bytes() == content
        journal.add(row("a"))
        journal.close()
        assert names(Journal(path).rows()) == ["a"]
    assert "is moved aside and made anew from the jobs' files" in caplog.text


def test_what_is_left_of_a_journal_that_is_gone_says_nothing(journal: Journal, path: Path) -> None:
    journal.add(row("a"))
    path.unlink()
    anew = Journal(path)
    assert list(anew.rows()) == []
    anew.add(row("b"))
    assert names(Journal(path).rows()) == ["b"]


def test_a_file_that_is_empty_is_a_journal_that_was_not_begun(path: Path) -> None:
    path.touch()
    assert not Journal(path).was_damaged


@pytest.mark.parametrize(
    "change",
    [
        "PRAGMA user_version = 3",
        "PRAGMA user_version = 1",
        "DROP INDEX jobs_of_tenant",
        "ALTER TABLE jobs ADD COLUMN colour TEXT",
        "UPDATE jobs SET tenant = 'bob'",
        "UPDATE jobs SET stored_bytes = 5",
        "DROP TABLE boots",
    ],
)
def test_tables_that_are_not_as_they_were_written_are_moved_aside(journal: Journal, path: Path, change: str) -> None:
    journal.add(row("a"))
    journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute(change)
    connection.close()
    changed = Journal(path)
    assert changed.was_damaged
    assert list(changed.rows()) == []


def test_a_journal_that_cannot_be_opened_ends_the_start(path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot be opened: .*No such file or directory"):
        Journal(path / "nowhere" / "journal.db")
    path.mkdir()
    with pytest.raises(StartupError, match="cannot be opened: unable to open database file"):
        Journal(path)


def test_nothing_that_is_asked_for_often_reads_all_jobs(journal: Journal) -> None:
    asked: list[str] = []
    journal.add(row("a", idempotency_key="k"))
    journal._connection.set_trace_callback(asked.append)
    journal.add(row("b"))
    journal.set_running("a", 0)
    end(journal, "a", artifact_bytes=1)
    journal.set_stored_bytes("a", 1, 0)
    journal.live()
    journal.find_key("ann", "k")
    journal.page("ann", (), "", 5)
    journal.page(None, (), "", 5)
    journal.oldest_ended(["ann", "bob"])
    journal.oldest_with_artifacts_of(["ann", "bob"])
    journal.oldest_with_artifacts()
    journal.newest_with_artifacts()
    journal.remove("a")
    journal._connection.set_trace_callback(None)
    assert len(asked) > 12
    for statement in asked:
        if statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT", "\nUPDATE")):
            plan = journal._connection.execute(f"EXPLAIN QUERY PLAN {statement}").fetchall()
            steps = [detail for *_, detail in plan]
            assert "SCAN jobs" not in steps, f"{statement}: {steps}"
            assert "USE TEMP B-TREE FOR ORDER BY" not in steps or "ended_s IS NULL" in statement, statement
