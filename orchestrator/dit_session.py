"""A job's session at the DiT worker: opened once something has yet to be sampled, and brought to where that is."""

from __future__ import annotations

from core.phases import Phase
from h3stream.errors import ResumeError
from orchestrator.chunk_store import ChunkStore
from orchestrator.job import Job
from orchestrator.lane import Lane
from orchestrator.latents import to_its_end
from orchestrator.output import Output, enter
from orchestrator.worker_clients import Stills, TensorParts


class DitSession:
    """Samples what is not in the store of finished chunks."""

    def __init__(self, job: Job, lane: Lane, output: Output, store: ChunkStore) -> None:
        """output: is told of forwards and stills."""
        self.embedding: TensorParts | None = None
        """Hidden states of the prompt, once the session is open."""
        self.has_stills = False
        """Whether there are to be stills."""
        self._job = job
        self._lane = lane
        self._output = output
        self._store = store
        self._num_committed: int | None = None
        """Chunks in the KV cache; None: the session has not been opened here."""
        self._sampled_index = -1
        """The chunk that stands in the worker as it was sampled, to be committed."""

    async def sample(self, index: int) -> TensorParts:
        """The latents of a chunk; all before it are in the store, and it is afterwards."""
        if self._num_committed is None or self._num_committed > index:
            await self._open(index)
        for before in range(self._num_committed or 0, index):
            await self._commit(before)
        await enter(self._job, self._lane, Phase.DENOISE, index)
        latents = await self._latents(index)
        self._sampled_index = index
        await to_its_end(self._store.put, index, latents)
        return latents

    async def sample_dense(self) -> None:
        """Samples the whole clip, and stores its chunks."""
        await self._open(0)
        await enter(self._job, self._lane, Phase.DENOISE)
        async for result in self._lane.dit.sample_dense(self._job.job_id):
            self._output.sampled(result)
        for index in range(len(self._job.plan.chunks)):
            await to_its_end(self._store.put, index, await self._latents(index))

    async def _open(self, index: int) -> None:
        """Opens the session, or finds it open, with no chunk from `index` on in its KV cache."""
        job, lane = self._job, self._lane
        embedding = await lane.text_encoder.lookup(job.prompt)
        if embedding is None:
            await enter(job, lane, Phase.ENCODE)
            embedding = await lane.text_encoder.encode(job.prompt)
        await enter(job, lane, Phase.PREFILL)
        stills = await self._stills()
        opened = await lane.dit.open_session(job.job_id, job.clip, job.noise, embedding, stills)
        if opened.num_committed_chunks > index:  # what follows a chunk whose latents were damaged
            await lane.dit.close_session(job.job_id)
            opened = await lane.dit.open_session(job.job_id, job.clip, job.noise, embedding, stills)
        if opened.preview_unavailable_reason:
            job.warn("PREVIEW_UNAVAILABLE", opened.preview_unavailable_reason)
        if opened.kv_storage_fallback_reason:
            job.warn("KV_STORAGE_FALLBACK", opened.kv_storage_fallback_reason)
        await to_its_end(self._store.note_opened, opened)
        self.embedding = embedding
        self.has_stills = stills is not None and not opened.preview_unavailable_reason
        self._num_committed = opened.num_committed_chunks
        self._sampled_index = -1

    async def _stills(self) -> Stills | None:
        """The stills to make on the way; None where none are wanted, or none can be, which is told."""
        if not self._job.plan.preview.max_side:
            return None
        vae = await self._lane.vae.describe()
        if not vae.HasField("preview_map"):
            message = "there will be no stills: the VAE worker could not make their map when it started"
            self._job.warn("PREVIEW_UNAVAILABLE", message)
            return None
        return Stills(self._job.plan.preview, vae.preview_map)

    async def _commit(self, index: int) -> None:
        """Puts a finished chunk into the KV cache."""
        if index != self._sampled_index:
            latents = await to_its_end(self._store.get, index)
            if latents is None:
                raise ResumeError(f"the latents of chunk {index} are no longer there")
            await self._lane.dit.restore_chunk(self._job.job_id, index, latents)
        await enter(self._job, self._lane, Phase.COMMIT, index)
        await self._lane.dit.commit_chunk(self._job.job_id, index)
        self._num_committed = index + 1

    async def _latents(self, index: int) -> TensorParts:
        """The latents of a chunk, its steps announced if it has yet to be sampled."""
        latents: TensorParts = ()
        async for result in self._lane.dit.sample_chunk(self._job.job_id, index):
            if isinstance(result, tuple):
                latents = result
            else:
                self._output.sampled(result)
        return latents
