"""The guide tells the truth: its programs run, its commands parse, its tables are complete."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from h3stream import GenerateRequest, errors
from h3stream.cli import make_parser
from h3stream.codec import PAYLOADS
from h3stream.status import STATUS_OF
from tests.fakes import FakeVideoService, media_of, plan_of, serve_video

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "api.md").read_text()
READMES = (ROOT / "README.md").read_text() + (ROOT / "client" / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with serve_video(FakeVideoService()) as address:
        yield address


@pytest.mark.parametrize("program", blocks(GUIDE, "python") + blocks(READMES, "python"))
async def test_every_program_runs(
    program: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "127.0.0.1:50051" in program
    await asyncio.to_thread(exec, program.replace("127.0.0.1:50051", address), {"__name__": "__main__"})
    clip = tmp_path / "clip.mp4"
    if "clip.mp4" in program:
        assert clip.read_bytes() == media_of(plan_of(GenerateRequest("a red kite over the sea")))
    else:
        assert capsys.readouterr().out


@pytest.mark.parametrize("line", "".join(blocks(GUIDE, "sh") + blocks(READMES, "sh")).splitlines())
def test_every_command_parses(line: str) -> None:
    words = shlex.split(line.partition("#")[0].partition("|")[0])
    assert words[0] == "h3stream"
    _, extra = make_parser().parse_known_args(words[1:])
    assert words[1] == "serve" or extra == []


def test_the_table_of_errors_is_the_tree() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([A-Z_]+)` \| `([A-Z_]+)` \|", GUIDE, re.MULTILINE)
    expected = {(cls.__name__, cls.reason, code.name) for cls, code in STATUS_OF.items()}
    expected.remove(("GenerationError", errors.GenerationError.reason, "UNKNOWN"))
    assert set(rows) == expected


def test_the_table_of_events_is_the_contract() -> None:
    rows = re.findall(r"^\| `(\w+)` \(`(\w+)`\) \|", GUIDE, re.MULTILINE)
    assert {field: cls for cls, field in rows} == {name: cls.__name__ for name, (cls, _) in PAYLOADS.items()}


@pytest.mark.parametrize(
    "page", ["README.md", "client/README.md", "docs/api.md", "docs/architecture.md", "docs/web.md"]
)
def test_every_link_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    headings = {"#" + re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    lost = [
        link
        for link in links
        if not (link in headings if link.startswith("#") else ((ROOT / page).parent / link.partition("#")[0]).exists())
    ]
    assert lost == []
