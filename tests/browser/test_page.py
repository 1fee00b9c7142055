"""The page in a real browser: plays while sampling goes on, outlives cuts and reloads, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from h3stream.errors import QuotaExceededError
from h3stream.refine import RefineSpec
from h3stream.request import Branch
from tests.browser.chromium import AUTOPLAY, NO_AUTOPLAY, Page, browser
from tests.fakes import ADAPTERS, SERVER_INFO, plan_of
from tests.web_service import LiveService, running_gateway, serve_live

COUNTER = """
window.counts = { urls: 0, buffers: 0, sources: 0 };
const count = (owner, name, key, change) => {
  const real = owner[name];
  owner[name] = function (...given) {
    const result = real.apply(this, given);
    if (name !== "revokeObjectURL" || given[0]) counts[key] += change;
    return result;
  };
};
count(URL, "createObjectURL", "urls", 1);
count(URL, "revokeObjectURL", "urls", -1);
count(MediaSource.prototype, "addSourceBuffer", "buffers", 1);
count(MediaSource.prototype, "removeSourceBuffer", "buffers", -1);
const RealEventSource = EventSource;
window.EventSource = class extends RealEventSource {
  #isOpen = true;
  constructor(...given) { super(...given); counts.sources++; }
  close() { if (this.#isOpen) counts.sources--; this.#isOpen = false; super.close(); }
};
"""
WITHOUT_MSE = "delete window.MediaSource; delete window.ManagedMediaSource;"
WITHOUT_HLS = 'HTMLMediaElement.prototype.canPlayType = (kind) => kind.includes("mpegurl") ? "" : "maybe";'
BUFFERED = "video.buffered.length === 1 && video.buffered.end(0)"
ENDED = "document.getElementById('phase').textContent === 'Done'"


class Proxy:
    """Passes connections on to the gateway, until they are cut."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self.is_open = True
        self.is_silent = False
        self.num_cut = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def close(self) -> None:
        """Ends every connection and waits until it has."""
        self.is_open = False
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.transport.abort()
            return
        back_reader, back_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back_writer}
        await asyncio.gather(self._pump(reader, back_writer), self._pump(back_reader, writer))
        self._writers -= {writer, back_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                if not self.is_silent:
                    writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Ends every connection where it stands."""
        self.num_cut += len(self._writers)
        for writer in self._writers:
            writer.transport.abort()


Opener = Callable[..., AbstractAsyncContextManager[Page]]


@pytest.fixture
def service() -> LiveService:
    return LiveService(step_s=0.05)


@pytest.fixture
async def proxy(service: LiveService) -> AsyncIterator[Proxy]:
    async with serve_live(service) as address, running_gateway(address) as gateway:
        proxy = Proxy(gateway)
        server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
        proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"  # type: ignore[attr-defined]
        yield proxy
        server.close()
        await proxy.close()


@pytest.fixture
def opened(proxy: Proxy, tmp_path: Path) -> Opener:
    @asynccontextmanager
    async def open_page(*scripts: str, autoplay: str = AUTOPLAY) -> AsyncIterator[Page]:
        async with browser(tmp_path / "profile", autoplay) as page:
            for script in (COUNTER, *scripts):
                await page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
            await page.go(proxy.url)  # type: ignore[attr-defined]
            await page.until("document.getElementById('num_frames').options.length > 0")
            yield page
            assert page.problems == []

    return open_page


async def start(page: Page, num_frames: int = 73, width: int = 256, height: int = 160) -> None:
    """Fills in the form and submits it."""
    await page.run(
        f"""document.getElementById('prompt').value = 'an evening sun'; num_frames.value = '{num_frames}';
        canvas.value = 'custom'; canvas.dispatchEvent(new Event('change'));
        width.value = '{width}'; height.value = '{height}'; form.requestSubmit()"""
    )


async def snap(page: Page, name: str) -> None:
    """A screenshot for those who want to look: where H3STREAM_SCREENSHOTS names a directory."""
    if directory := os.environ.get("H3STREAM_SCREENSHOTS"):
        await page.screenshot(Path(directory) / f"{name}.png")


async def test_a_clip_plays_while_the_rest_is_sampled(opened: Opener, service: LiveService) -> None:
    async with opened() as page:
        await page.resize(1280, 900)
        await snap(page, "1-idle")
        service.allow(1)
        await start(page)
        await page.until("!still.hidden && still.naturalWidth > 0")  # a picture before anything can be played
        await snap(page, "2-still")
        service.allow(3)
        await page.until(f"{BUFFERED} > 1.4 && video.currentTime > 0.5")
        assert service.jobs["job-0"].state == "running"
        assert await page.run("video.muted && !video.paused && !unmute.hidden")
        assert await page.run("document.querySelectorAll('#timeline li.chunk[data-state=ready]').length") == 3
        await page.run("unmute.click()")
        assert not await page.run("video.muted")
        await snap(page, "3-playing")
        service.allow(99)
        await page.until(f"{ENDED} && artifacts.childElementCount === 4")
        assert "51 of 73 frames had arrived before the last chunk was sampled" in await page.run("facts.textContent")
        names = await page.run("[...artifacts.querySelectorAll('a')].map((link) => link.textContent)")
        assert names == ["final.mp4", "stream.mp4", "latents.safetensors"]
        # Played to the end, the clip is the finished file and nothing of the stream is left.
        await page.until("video.currentSrc.endsWith('/artifacts/final.mp4') && video.readyState > 0")
        assert await page.run("video.duration") == pytest.approx(73 / 24, abs=0.05)
        assert await page.run("counts") == {"urls": 0, "buffers": 0, "sources": 0}
        await snap(page, "4-done")
        await page.resize(1280, 900, is_dark=True)
        await snap(page, "5-done-dark")


async def test_a_cut_network_costs_nothing_but_time(opened: Opener, service: LiveService, proxy: Proxy) -> None:
    async with opened() as page:
        service.allow(2)
        await start(page)
        await page.until(f"{BUFFERED} > 0.6")
        proxy.is_open = False
        proxy.cut()
        assert proxy.num_cut > 0
        await page.until("!connection.hidden")
        service.allow(4)
        while len(service.jobs["job-0"].events) < 25:
            await asyncio.sleep(0.02)
        proxy.is_open = True
        await page.until(f"connection.hidden && {BUFFERED} > 2")
        service.allow(99)
        await page.until(ENDED)
        await page.until("video.ended || video.currentSrc.endsWith('final.mp4')")


async def test_a_connection_that_only_falls_silent_is_made_anew(
    opened: Opener, service: LiveService, proxy: Proxy
) -> None:
    impatient = "const wait = setTimeout; window.setTimeout = (f, ms) => wait(f, ms === 10000 ? 1500 : ms);"
    async with opened(impatient) as page:
        service.allow(2)
        await start(page, 39)
        await page.until(f"{BUFFERED} > 0.6")
        proxy.is_silent = True
        service.allow(99)
        while service.jobs["job-0"].state == "running":
            await asyncio.sleep(0.02)
        await page.until("!connection.hidden")
        proxy.is_silent = False
        proxy.cut()  # what it has swallowed does not come back
        await page.until(f"connection.hidden && {ENDED}")


async def test_a_reload_finds_the_clip_again(opened: Opener, service: LiveService) -> None:
    async with opened() as page:
        service.allow(3)
        await start(page)
        await page.until(f"{BUFFERED} > 1.4")
        assert await page.run("location.hash") == "#job=job-0"
        await page.run("window.isOld = true")
        await page.call("Page.reload")
        await page.until(f"!window.isOld && {BUFFERED} > 1.4 && video.currentTime > 0.3")
        assert len(service.jobs) == 1
        service.allow(99)
        await page.until(ENDED)
        await page.run("window.isOld = true")
        await page.call("Page.reload")
        await page.until(f"!window.isOld && {ENDED} && artifacts.childElementCount === 4")
        assert await page.run("cancel.hidden && !generate.disabled")


async def test_a_reload_finds_what_the_clip_was_asked_for_with(opened: Opener, service: LiveService) -> None:
    seed = 2**64 - 1  # more digits than a number of JavaScript has
    async with opened() as page:
        before = await page.run("[...new FormData(form)].join()")
        await page.run(
            f"""seed.value = '{seed}'; stills.checked = false; refine_audio.checked = true;
            document.querySelector('[name=mode][value=dense]').click();
            document.querySelector('#adapter-list [type=checkbox]').click();
            document.querySelector('#adapter-list [type=number]').value = '0.5'"""
        )
        await start(page, 22)
        await page.until(f"{ENDED} && facts.textContent.includes('Seed {seed},')")
        assert service.jobs["job-0"].request.seed == seed
        assert await page.run("caption.textContent") == "an evening sun"
        held = await page.run("JSON.stringify([...new FormData(form)])")
        await page.run("window.isOld = true")
        await page.call("Page.reload")
        await page.until(f"!window.isOld && {ENDED} && caption.textContent === 'an evening sun'")
        assert await page.run("[...new FormData(form)].join()") != before
        # Steps that the adapter chose are told as the number they are.
        assert await page.run("JSON.stringify([...new FormData(form)])") == held.replace('"steps",""', '"steps","5"')
        assert await page.run("!stills.checked && refine_audio.checked")
        assert await page.run("document.querySelector('#adapter-list [type=checkbox]').checked")
        assert await page.run("document.querySelector('#adapter-list [type=number]').value") == "0.5"
        await page.run("form.requestSubmit()")
        await page.until(f"location.hash === '#job=job-1' && {ENDED}")
        first, second = (plan_of(service.jobs[name].request) for name in ("job-0", "job-1"))
        assert first == second
        # A clip that was asked for elsewhere has its settings and its prompt, too.
        service.jobs["job-0"].request = replace(service.jobs["job-0"].request, prompt="a morning sun")
        await page.run("location.hash = '#job=job-0'")
        await page.until("caption.textContent === 'a morning sun'")
        assert await page.run("document.getElementById('prompt').value") == "a morning sun"
        await page.run("location.hash = '#job=job-1'")


async def test_the_model_s_examples_fill_the_prompt(opened: Opener, service: LiveService) -> None:
    chips = "document.querySelectorAll('#example-list button')"
    value = "document.getElementById('prompt').value"
    examples = tuple(f"A small red ball of number {n} bounces over a green meadow, humming low." for n in range(10))
    service.info = replace(SERVER_INFO, examples=examples)
    async with opened() as page:
        await page.resize(1280, 900)
        assert tuple(await page.run(f"[...{chips}].map((chip) => chip.textContent)")) == examples
        assert await page.run("document.getElementById('prompt').placeholder") == examples[0]
        assert await page.run(value) == ""
        await page.run(f"{chips}[9].focus()")  # which scrolls to it
        await page.press("Enter", 13, "\r")
        assert await page.run(value) == examples[9]
        await snap(page, "12-examples")
        assert service.jobs == {}
        await page.resize(360, 740)
        assert await page.run("document.documentElement.scrollWidth <= 360")
        await snap(page, "13-examples-narrow")
        await page.run("form.requestSubmit()")
        await page.until(ENDED)
        assert service.jobs["job-0"].request.prompt == examples[9]


async def test_a_model_without_examples_leaves_no_gap(opened: Opener, service: LiveService) -> None:
    service.info = replace(SERVER_INFO, examples=())
    async with opened() as page:
        assert await page.run("document.getElementById('examples').offsetHeight") == 0
        assert "fox" in await page.run("document.getElementById('prompt').placeholder")


async def test_a_server_without_the_streaming_adapter_is_offered_for_dense_clips(
    opened: Opener, service: LiveService
) -> None:
    turbo = ADAPTERS[1]
    service.info = replace(SERVER_INFO, adapters=(turbo, replace(turbo, name="style")))
    async with opened() as page:
        await page.run("more.open = true")
        modes = (
            "[...document.querySelectorAll('[name=mode]')].map((radio) => [radio.value, radio.checked, radio.disabled])"
        )
        assert await page.run(modes) == [["streaming", False, True], ["dense", True, False]]
        assert "no streaming adapter" in await page.run("document.getElementById('mode-hint').innerText")
        assert await page.run("steps.placeholder") == "5"
        strengths = "[...document.querySelectorAll('#adapter-list [type=number]')]"
        above, below = await page.run(f"{strengths}.map((input) => input.getBoundingClientRect().toJSON())")
        assert below["top"] - above["bottom"] >= 6
        await snap(page, "11-dense-only")
        await start(page, 22)
        await page.until(ENDED)
        assert service.jobs["job-0"].request.mode == "dense"


async def test_without_a_server_nothing_can_be_asked_for(tmp_path: Path) -> None:
    async with running_gateway("127.0.0.1:1") as gateway, browser(tmp_path / "profile") as page:
        await page.go(f"http://{gateway}/")
        await page.until("server.textContent.startsWith('Waiting for the server')")
        assert await page.run("generate.disabled")
        await page.run("window.fetch = () => { throw new Error('asked'); }; form.requestSubmit()")
        assert await page.run("document.getElementById('form-error').textContent") == ""


async def test_a_cancelled_clip_leaves_nothing_behind(opened: Opener, service: LiveService) -> None:
    async with opened() as page:
        before = await page.listeners("#video")
        service.allow(3)
        await start(page)
        await page.until(f"{BUFFERED} > 1.4 && video.currentTime > 0.2")
        assert await page.run("counts.buffers") == 1
        assert len(await page.listeners("#video")) > len(before)
        await page.run("document.getElementById('cancel').click()")
        await page.until("phase.textContent === 'Cancelled'")
        assert service.jobs["job-0"].state == "cancelled"
        assert await page.run("counts") == {"urls": 0, "buffers": 0, "sources": 0}
        assert await page.listeners("#video") == before
        assert await page.run("!video.hasAttribute('src') && video.readyState === 0 && !generate.disabled")
        assert await page.run("artifacts.querySelector('a').getAttribute('href')") == (
            "api/jobs/job-0/stream.mp4?partial=true"
        )
        assert await page.run(
            "fetch(artifacts.querySelector('a').href).then((r) => r.arrayBuffer()).then((b) => b.byteLength)"
        )
        await snap(page, "6-cancelled")
        while service.num_attached:
            await asyncio.sleep(0.01)
        service.allow(99)
        await start(page, 22)  # and the next clip plays
        await page.until(f"{ENDED} && artifacts.childElementCount === 4")
        assert "All 22 frames came once sampling was done" in await page.run("facts.textContent")


LEVEL = 0.1 / 0.12
"""How much the refined sound of the fake is turned down to be as loud as the streamed one."""


async def test_a_finished_clip_s_sound_is_refined_and_both_can_be_heard(opened: Opener, service: LiveService) -> None:
    service.refine_steps_allowed = 2
    async with opened() as page:
        await page.resize(1280, 1000)
        await start(page, 39)
        await page.until(f"{ENDED} && !document.getElementById('refine-offer').hidden")
        await page.until("video.currentSrc.endsWith('/artifacts/final.mp4') && video.readyState > 0")
        await page.run("depth.value = '0.3'; document.getElementById('refine').click()")
        await page.until("document.getElementById('refine-phase').textContent.includes('step 2 of 6')")
        assert await page.run("document.getElementById('refine-detail').textContent") == "from the cache"
        assert await page.run("location.hash") == "#job=job-0&refined=job-1"
        assert service.jobs["job-1"].request.refine_audio == RefineSpec(audio_denoise=0.3)
        await page.run("video.currentTime = 0.7")
        await snap(page, "9-refining")
        service.allow_refining(99)
        await page.until("!sounds.hidden && refining.hidden")
        names = "[...artifacts.querySelectorAll('a')].map((link) => link.getAttribute('href'))"
        # What one can watch stands first.
        hrefs = await page.run(names)
        assert hrefs[:2] == ["api/jobs/job-0/artifacts/final.mp4", "api/jobs/job-1/artifacts/refined.mp4"]
        assert hrefs[-1] == "api/jobs/job-1/artifacts/refined.flac"
        # The other sound goes on where the first one was, as loud as that.
        await page.run("document.querySelector('[name=sound][value=refined]').click()")
        await page.until("video.currentSrc.endsWith('/job-1/artifacts/refined.mp4') && video.readyState > 1")
        assert await page.run("video.currentTime") == pytest.approx(0.7, abs=0.05)
        assert await page.run("video.paused")
        assert await page.run("video.volume") == pytest.approx(LEVEL, abs=0.01)
        await snap(page, "10-refined")
        await page.run("video.volume = 0.5; video.play()")
        await page.until("video.currentTime > 0.9")
        await page.run("document.querySelector('[name=sound][value=streamed]').click()")
        await page.until("video.currentSrc.endsWith('/artifacts/final.mp4') && video.currentTime > 0.9")
        assert not await page.run("video.paused && !video.ended")
        assert await page.run("video.volume") == pytest.approx(0.5 / LEVEL, abs=0.01)
        # A reload finds both again.
        await page.run("window.isOld = true")
        await page.call("Page.reload")
        await page.until("!window.isOld && !sounds.hidden && refining.hidden")
        assert len(service.jobs) == 2
        await page.run("location.hash = '#job=job-1'")  # which is the refinement's
        await page.until("location.hash === '#job=job-0&refined=job-1'")
        await page.until(f"{ENDED} && !sounds.hidden && refining.hidden")
        await page.resize(360, 740)
        assert await page.run("document.documentElement.scrollWidth <= 360")


async def test_a_clip_may_be_refined_at_once_and_plays_meanwhile(opened: Opener, service: LiveService) -> None:
    service.refine_steps_allowed = 3
    async with opened() as page:
        await page.run("refine_audio.checked = true")
        await start(page)
        await page.until("document.getElementById('refine-phase').textContent.includes('step 3 of 6')")
        assert service.jobs["job-0"].state == "running"
        await page.until("video.currentTime > 0.5")
        assert await page.run("document.querySelector('#timeline li:last-child').dataset.state") == "active"
        service.allow_refining(99)
        await page.until(f"{ENDED} && !sounds.hidden && artifacts.childElementCount === 6")
        # Also in the middle of the stream, of which nothing is left then.
        await page.run("video.play(); document.querySelector('[name=sound][value=refined]').click()")
        await page.until("video.currentSrc.endsWith('/job-0/artifacts/refined.mp4') && video.readyState > 1")
        assert await page.run("counts") == {"urls": 0, "buffers": 0, "sources": 0}


async def test_a_refinement_that_is_cancelled_leaves_the_clip(opened: Opener, service: LiveService) -> None:
    service.refine_steps_allowed = 1
    async with opened() as page:
        await page.run("refine_audio.checked = true")
        await start(page, 22)
        await page.until("document.getElementById('refine-phase').textContent.includes('step 1 of 6')")
        await page.run("document.getElementById('cancel').click()")
        await page.until("phase.textContent === 'Cancelled' && artifacts.childElementCount === 4")
        await page.until("video.currentSrc.endsWith('/artifacts/final.mp4')")
        assert await page.run("refining.hidden && sounds.hidden && !document.getElementById('refine-offer').hidden")
        # And once more, as a job of its own, which is cancelled too.
        await page.run("document.getElementById('refine').click()")
        at_step_1 = "document.getElementById('refine-phase').textContent.includes('step 1 of 6')"
        await page.until(f"{at_step_1} && document.getElementById('cancel-refine').offsetHeight > 0")
        await page.run("document.getElementById('cancel-refine').click()")
        await page.until("document.getElementById('refine-problem').textContent === 'Cancelled.'")
        assert service.jobs["job-1"].state == "cancelled"
        assert await page.run("!document.getElementById('refine-offer').hidden && counts.sources === 0")
        # What cannot be is told, whichever job it is.
        service.refine_failure = "the cache needs 9.7 GiB"
        await page.run("document.getElementById('refine').click()")
        await page.until("document.getElementById('refine-problem').textContent === 'the cache needs 9.7 GiB'")
        service.allow_refining(99)
        await start(page, 22)
        await page.until(f"{ENDED} && document.getElementById('refine-problem').textContent.includes('9.7 GiB')")
        await page.until("sounds.hidden && !document.getElementById('refine-offer').hidden")


async def test_a_clip_that_is_unknown_is_told(opened: Opener, proxy: Proxy) -> None:
    async with opened() as page:
        await page.run("location.hash = '#job=nothing'")
        await page.until("problem.textContent.includes('does not know this clip')")
        assert await page.run("location.hash === '' && !generate.disabled")
        assert await page.run("counts") == {"urls": 0, "buffers": 0, "sources": 0}


async def test_a_clip_without_a_stream_ends_with_its_files(opened: Opener, service: LiveService) -> None:
    service.has_stream = False
    async with opened() as page:
        await start(page, 22)
        await page.until(f"{ENDED} && document.getElementById('hint').textContent.includes('no encoder worked')")
        await page.until("artifacts.childElementCount === 1")
        assert await page.run("counts") == {"urls": 0, "buffers": 0, "sources": 0}


async def test_what_is_wrong_is_told_at_its_field(opened: Opener) -> None:
    async with opened() as page:
        await page.run("num_frames.add(new Option('wrong', '40')); num_frames.value = '40'; form.requestSubmit()")
        await page.until("document.activeElement === num_frames && num_frames.getAttribute('aria-invalid') === 'true'")
        assert "17k + 5" in await page.run("document.getElementById('num_frames-error').textContent")
        assert not await page.run("generate.disabled")
        await page.run("num_frames.value = '39'; seed.value = 'lucky'; form.requestSubmit()")
        await page.until("document.activeElement === seed && document.getElementById('seed-error').textContent")
        assert "'lucky'" in await page.run("document.getElementById('seed-error').textContent")
        # The ring around the field, 3 pixels wide and 2 away, hides nothing of it.
        gap = "document.getElementById('seed-error').getBoundingClientRect().top - seed.getBoundingClientRect().bottom"
        assert await page.run(gap) >= 5


async def test_a_browser_that_refuses_to_start_offers_a_button(opened: Opener, service: LiveService) -> None:
    refuse = """
    const play = HTMLMediaElement.prototype.play;
    HTMLMediaElement.prototype.play = function () {
      return navigator.userActivation.isActive ? play.call(this)
        : Promise.reject(new DOMException("a gesture is needed", "NotAllowedError"));
    };
    """
    async with opened(refuse, autoplay=NO_AUTOPLAY) as page:
        await start(page, 22)
        await page.until("!document.getElementById('play').hidden")
        await page.run("document.getElementById('play').focus()")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('play').hidden && video.currentTime > 0.2")


@pytest.mark.parametrize("scripts", [(WITHOUT_MSE,), (WITHOUT_MSE, WITHOUT_HLS)], ids=["hls", "progressive"])
async def test_without_media_source_extensions_it_plays_too(
    opened: Opener, service: LiveService, scripts: tuple[str, ...]
) -> None:
    async with opened(*(["window.MediaSource ??= class {};"]), *scripts) as page:
        hls = await page.run("video.canPlayType('application/vnd.apple.mpegurl') !== ''")
        if not hls and len(scripts) == 1:
            pytest.skip("this Chromium plays no HLS by itself")
        service.allow(3)
        await start(page)
        await page.until("video.currentTime > 0.3")
        assert service.jobs["job-0"].state == "running"
        assert (await page.run("video.currentSrc")).endswith("index.m3u8" if hls else "stream.mp4")
        service.allow(99)
        await page.until(ENDED)
        await page.until("video.currentSrc.endsWith('final.mp4')")


@pytest.mark.parametrize("is_dark", [False, True])
async def test_it_fits_a_phone(opened: Opener, service: LiveService, is_dark: bool) -> None:
    async with opened() as page:
        await page.resize(360, 740, is_dark=is_dark)
        fits = "document.documentElement.scrollWidth <= 360"
        await page.run("more.open = true")
        assert await page.run(fits)
        await snap(page, f"7-phone-form-{is_dark}")
        service.allow(12)
        await start(page, 362, 64, 96)
        await page.until("video.currentTime > 0.2 && !document.getElementById('progress').hidden")
        assert await page.run(fits)
        small = "[...document.querySelectorAll('button, select, textarea, input[type=number]')]"
        assert await page.run(f"{small}.filter((e) => e.offsetHeight > 0 && e.offsetHeight < 40).length") == 0
        await snap(page, f"8-phone-playing-{is_dark}")


async def test_the_keyboard_reaches_everything(opened: Opener, service: LiveService) -> None:
    async with opened() as page:
        reached = []
        outline = "document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle"
        for _ in range(12):
            await page.press("Tab", 9)
            reached.append(await page.run("document.activeElement.id || document.activeElement.tagName"))
            assert await page.run(outline) in (True, "solid"), reached
        assert [name for name in ("prompt", "num_frames", "canvas", "generate") if name not in reached] == []
        inputs = "[...document.querySelectorAll('input, select, textarea')]"
        assert await page.run(f"{inputs}.filter((e) => !e.labels.length && !e.ariaLabel).map((e) => e.id)") == []


async def test_a_page_without_a_key_asks_for_it_and_puts_it_in_no_address(service: LiveService, tmp_path: Path) -> None:
    key = "h3s_k1_s3cret"
    service.api_keys = (key,)
    async with (
        serve_live(service) as address,
        running_gateway(address) as gateway,
        browser(tmp_path / "profile", AUTOPLAY) as page,
    ):
        await page.go(f"http://{gateway}/")
        element = "document.getElementById('{}')".format
        await page.until(f"!{element('key-form')}.hidden")
        assert await page.run(f"{element('key-problem')}.textContent") == "This server asks for an API key."
        assert await page.run("generate.disabled")
        await snap(page, "12-key")
        for given, awaited in (
            ("h3s_k1_other", f"{element('key-problem')}.textContent.includes('no such API key')"),
            (key, f"{element('key-form')}.hidden && !generate.disabled"),
        ):
            await page.run(f"{element('key')}.value = '{given}'; {element('key-form')}.requestSubmit()")
            await page.until(awaited)
        await start(page)
        # What the element fetches by itself carries the key, too.
        await page.until(f"{ENDED} && video.currentSrc.endsWith('final.mp4') && video.readyState > 0")
        fetched = "performance.getEntriesByType('resource').map((entry) => entry.name).join()"
        assert "s3cret" not in await page.run(f"{fetched} + location.href + document.cookie")
        await page.run("window.isOld = true")
        await page.call("Page.reload")
        await page.until(f"!window.isOld && {ENDED} && {element('key-form')}.hidden")
        await page.run(f"window.isOld = true; {element('forget-key')}.click()")
        await page.until(f"!window.isOld && !{element('key-form')}.hidden")
        await page.until(f"{element('problem')}.textContent === 'This server asks for an API key.'")
        await page.run(f"{element('key')}.value = '{key}'; {element('key-form')}.requestSubmit()")
        await page.until(f"{ENDED} && {element('problem')}.textContent === ''")
        assert page.problems == []


async def test_a_running_clip_goes_on_another_way(opened: Opener, service: LiveService) -> None:
    async with opened() as page:
        service.allow(2)
        await start(page)
        await page.until("!branching.hidden && document.getElementById('branch-chunk').length === 1")
        await page.run("branching.open = true")
        await snap(page, "13-branch")
        service.allow(99)
        await page.until(f"{ENDED} && document.getElementById('branch-chunk').length === 4")
        await page.run(
            """document.getElementById('branch-chunk').value = '2'; document.getElementById('branch-seed').value = '7';
            document.getElementById('branch-prompt').value = 'snow';
            document.getElementById('branch-form').requestSubmit()"""
        )
        await page.until(f"location.hash === '#job=job-1' && {ENDED}")
        assert service.jobs["job-1"].request.branch == Branch("job-0", 2, "snow", 7)
        service.refuse_with = QuotaExceededError("2 jobs of studio wait already", retry_after_s=6.5)
        await page.run("document.getElementById('branch-form').requestSubmit()")
        told = "There is no room now: 2 jobs of studio wait already. Try again in 7 s."
        await page.until(f"document.getElementById('branch-problem').textContent === '{told}'")
