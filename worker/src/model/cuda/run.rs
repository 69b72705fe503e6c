//! A step on its way: told to the device, launched or replayed, its tokens fetched behind it; and what is
//! collected of it later. Waits for nothing before that, so that the host plans the next step meanwhile.

use std::mem;

use half::bf16;
use keyway_kernels::cuda::paged_attention::CutFor;
use keyway_kernels::cuda::sample::{SCORE_WORDS, Score};
use keyway_kernels::cuda::{Device, DeviceError, Launch, Slice};

use super::CudaBackend;
use super::forward::Forward;
use super::lead::{Counted, Exchanged, Failure};
use super::recordings::Met;
use super::room::Widths;
use super::rules::Wanted;
use super::sharing::Load;
use super::step::{Fixed, Step};
use crate::engine::backend::{Backend as _, Chunk, Draw, PENDING, StepError, StepOutput};

/// A step that was started.
#[derive(Debug)]
pub(super) struct UnderWay {
    /// Of each row that is wanted, whether its token is drawn.
    drawn: Vec<bool>,
    /// Of each, how many of the likeliest are wanted with its score; and the copy of scores, where any is.
    scored: Vec<Option<usize>>,
    scores: Option<u64>,
    /// Rows that went through the head.
    head_rows: usize,
    /// The device's number of the copy of what was drawn. There is one even if nothing was: it is what is
    /// waited for.
    fetch: u64,
    /// Where ranks share the experts.
    exchanged: Option<Exchanged>,
}

impl<D: Device> CudaBackend<D> {
    /// Tells the device of a step.
    pub(super) fn plan(
        &mut self,
        chunks: &[Chunk<'_>],
        draws: &[Option<Draw<'_>>],
    ) -> Result<Step, DeviceError> {
        let model = &mut self.model;
        let fixed = Fixed {
            rope: &model.rope,
            cache_groups: &self.plan.groups,
            block_size: self.kv.block_size,
            cut_for: CutFor {
                kind: model.heads.kind,
                kv_type: model.kv_type,
                kv_heads: model.heads.kv_heads,
                group: model.heads.heads / model.heads.kv_heads,
                unit: model.weights.embedding.unit,
                processors: model.device.processors(),
            },
            round: model.sharing.as_ref().map(|sharing| sharing.plan.layout.tokens),
        };
        let (rules, moves) = model.room.rules.prepare(&mut model.device, &wanted(chunks, draws))?;
        model.room.moves += moves;
        let step = Step::new(chunks, draws, &rules, &fixed);
        let sizes = [step.rows, step.head_rows(), step.partial_floats(&fixed)];
        let widths = Widths::new(&model.config, &model.heads);
        model.room.reserve(&mut model.device, &widths, &model.weights, sizes)?;
        model.room.tell(&mut model.device, &step.words)?;
        Ok(step)
    }

    /// What is launched for a step.
    fn launches(&self, step: &Step, load: Option<&Load>) -> Vec<Launch> {
        let model = &self.model;
        let widths = Widths::new(&model.config, &model.heads);
        let forward = Forward {
            config: &model.config,
            heads: model.heads,
            widths,
            weights: &model.weights,
            step,
            room: &model.room,
            processors: model.device.processors(),
            slabs: &self.slabs,
            places: &self.plan.places,
            sharing: model.sharing.as_ref().zip(load),
            layer: 0,
            launches: Vec::new(),
            rows: step.rows,
            residual: model.room.residual.slice(0, step.rows * widths.hidden),
            rows_by_head: 0,
        };
        forward.run()
    }

    /// Starts a step that no other rank has tokens in.
    pub(super) fn launch(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<(), Failure> {
        self.model.ensure_group()?;
        let step = self.plan(chunks, draws)?;
        let load = self.model.load_of(&step);
        if let Some(load) = &load {
            self.model.tell_ranks(load, step.form().is_some()).map_err(Failure::Rank)?;
        }
        self.launch_step(&step, draws, load)
    }

    /// Starts a step that the other ranks know of, if there are any.
    pub(super) fn launch_step(
        &mut self,
        step: &Step,
        draws: &[Option<Draw<'_>>],
        load: Option<Load>,
    ) -> Result<(), Failure> {
        self.model.device.mark()?;
        self.run(step, load.as_ref())?;
        self.model.device.mark()?;
        let words: Slice<u32> = self.model.room.drawn.slice(0, draws.len().max(1));
        let fetch = self.model.device.fetch(words.buffer, words.offset, words.len * size_of::<u32>())?;
        let scores = if step.scores.is_some() {
            let words: Slice<u32> = self.model.room.scores.slice(0, draws.len() * SCORE_WORDS);
            Some(self.model.device.fetch(words.buffer, words.offset, words.len * size_of::<u32>())?)
        } else {
            None
        };
        let exchanged = self.model.fetch_report(load)?;
        self.drawn = draws.iter().map(Option::is_some).collect();
        let (drawn, head_rows) = (self.drawn.clone(), step.head_rows());
        let scored = draws.iter().map(|draw| draw.and_then(|draw| draw.score)).collect();
        self.under_way.push_back(UnderWay { drawn, scored, scores, head_rows, fetch, exchanged });
        Ok(())
    }

    fn run(&mut self, step: &Step, load: Option<&Load>) -> Result<(), DeviceError> {
        let moves = self.model.room.moves;
        let form = step.form().map(|mut form| {
            form.extend(load.into_iter().flat_map(|load| load.rows.iter().chain(&load.wanted)));
            form
        });
        let met = form.as_ref().map(|form| self.recordings.meet(&mut self.model.device, moves, form));
        match (met, form) {
            (Some(Met::Recorded(recording)), _) => {
                self.replayed += 1;
                self.model.device.replay(recording)
            }
            (Some(Met::Before), Some(form)) => {
                let launches = self.launches(step, load);
                let recording = self.model.device.record(&launches)?;
                self.recordings.add(form, recording);
                self.model.device.replay(recording)
            }
            _ => self.launches(step, load).iter().try_for_each(|launch| self.model.device.launch(launch)),
        }
    }

    /// Waits for the step that was started first, and copies back what is wanted of it.
    pub(super) fn collect(&mut self, output: &mut StepOutput) -> Result<Counted, Failure> {
        output.tokens.clear();
        output.scores.clear();
        output.logits.clear();
        self.hidden.clear();
        let step = self.under_way.pop_front().ok_or_else(|| DeviceError("no step is under way".into()))?;
        self.output.resize(step.drawn.len().max(1) * size_of::<u32>(), 0);
        self.model.device.collect(step.fetch, &mut self.output)?;
        let counted = match &step.exchanged {
            Some(exchanged) => self.model.take_report(exchanged)?,
            None => Counted::default(),
        };
        let tokens = self.output.as_chunks().0.iter().zip(&step.drawn).filter(|(_, drawn)| **drawn);
        output.tokens.extend(tokens.map(|(bytes, _)| u32::from_le_bytes(*bytes)));
        self.collect_scores(&step, output)?;
        let (hidden, vocab) = (self.model.config.hidden, self.model.config.vocab_size);
        let logits_at = step.head_rows * hidden * size_of::<bf16>();
        let mut row = 0;
        for rows in step.drawn.chunk_by(|a, b| a == b) {
            if !rows[0] {
                self.read_output(row * hidden * size_of::<bf16>(), rows.len() * hidden * size_of::<bf16>())?;
                let numbers = self.output.as_chunks().0.iter();
                self.hidden.extend(numbers.map(|bytes| bf16::from_le_bytes(*bytes).to_f32()));
                let first = logits_at + row * vocab * size_of::<f32>();
                self.read_output(first, rows.len() * vocab * size_of::<f32>())?;
                let numbers = self.output.as_chunks().0.iter();
                output.logits.extend(numbers.map(|bytes| f32::from_le_bytes(*bytes)));
            }
            row += rows.len();
        }
        Ok(counted)
    }

    fn collect_scores(&mut self, step: &UnderWay, output: &mut StepOutput) -> Result<(), DeviceError> {
        let Some(fetch) = step.scores else { return Ok(()) };
        self.output.resize(step.scored.len() * SCORE_WORDS * size_of::<u32>(), 0);
        self.model.device.collect(fetch, &mut self.output)?;
        let words: Vec<u32> =
            self.output.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let rows = words.chunks_exact(SCORE_WORDS).zip(&step.scored);
        let vocab = self.model.config.vocab_size;
        output.scores.extend(rows.filter_map(|(row, top)| top.map(|top| Score::of(row, top.min(vocab)))));
        Ok(())
    }

    /// Some bytes of what a step gives back.
    fn read_output(&mut self, first: usize, bytes: usize) -> Result<(), DeviceError> {
        self.output.resize(bytes, 0);
        let from: Slice<u8> = self.model.room.output.slice(first, bytes);
        self.model.device.read(from.buffer, from.offset, &mut self.output)
    }
}

/// The rows that are wanted, and where their chunks' last tokens stand.
fn wanted<'a>(chunks: &[Chunk<'_>], draws: &[Option<Draw<'a>>]) -> Vec<Wanted<'a>> {
    let ends = chunks.iter().scan(0, |end, chunk| {
        *end += chunk.tokens.len();
        Some((*end, chunk))
    });
    let rows = ends.filter(|(_, chunk)| chunk.wants_logits).zip(draws);
    let wanted = |((end, chunk), draw): ((usize, &Chunk<'_>), &Option<Draw<'a>>)| Wanted {
        draw: *draw,
        token: end - 1,
        is_pending: chunk.tokens.last().is_some_and(|token| token & PENDING != 0),
    };
    rows.map(wanted).collect()
}

impl<D: Device + Send> CudaBackend<D> {
    /// # Panics
    /// If the seam's rules are broken: a device would read whatever lies behind the embeddings, or what no
    /// row drew.
    pub(super) fn check(&self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) {
        assert!(!chunks.is_empty(), "step: no chunks");
        assert!(chunks.iter().all(|chunk| !chunk.tokens.is_empty()), "step: a chunk has no tokens");
        let drawn = |row: u32| self.drawn.get(row as usize) == Some(&true);
        let known = |token: &u32| match token.checked_sub(PENDING) {
            None => (*token as usize) < self.vocab_size(),
            Some(row) => drawn(row),
        };
        let tokens = chunks.iter().flat_map(|chunk| chunk.tokens);
        assert!(tokens.into_iter().all(known), "step: a token is not in the vocabulary");
        let wanted = chunks.iter().filter(|chunk| chunk.wants_logits).count();
        assert_eq!(draws.len(), wanted, "step: an entry for each row");
        let masks = draws.iter().flatten().filter_map(|draw| draw.mask);
        let words = self.vocab_size().div_ceil(32);
        assert!(masks.into_iter().all(|mask| mask.len() == words), "step: a bit for each id");
        let ahead =
            self.under_way.len() < 2 && self.under_way.iter().all(|step| !step.drawn.contains(&false));
        assert!(ahead, "step: too many are under way, or one whose logits would be lost");
    }

    /// Lets go of all steps under way after an error, which is told.
    pub(super) fn or_give_up(&mut self, done: Result<(), Failure>) -> Result<(), StepError> {
        done.map_err(|failure| StepError(self.give_up(failure)))
    }

    /// The same; what those who wait are told.
    pub(super) fn give_up(&mut self, failure: Failure) -> String {
        self.model.room.rules.forget();
        for step in mem::take(&mut self.under_way) {
            // What it says is of no use any more.
            for fetch in [Some(step.fetch), step.scores].into_iter().flatten() {
                let _ = self.model.device.collect(fetch, &mut []);
            }
            if let Some(exchanged) = &step.exchanged {
                self.model.drop_report(exchanged);
            }
        }
        self.model.told_of(failure)
    }
}

#[cfg(feature = "cuda")]
impl CudaBackend<keyway_kernels::cuda::gpu::Gpu> {
    /// Milliseconds that each of `repeats` runs of a step takes on the device alone, without the host: for
    /// benchmarks.
    ///
    /// # Errors
    /// If the device fails.
    pub fn time_on_device(&mut self, chunks: &[Chunk<'_>], repeats: usize) -> Result<Vec<f32>, StepError> {
        let mut timed = || {
            let rows = chunks.iter().filter(|chunk| chunk.wants_logits).count();
            let step = self.plan(chunks, &vec![None; rows])?;
            let load = self.model.load_of(&step);
            let launches = self.launches(&step, load.as_ref());
            self.model.device.time(&launches, repeats)
        };
        timed().map_err(|error| StepError(error.to_string()))
    }

    /// Begins to measure for how long the device has nothing to compute between two steps.
    pub fn watch_idle(&mut self) {
        self.model.device.watch();
    }

    /// Milliseconds between the end of each step since [`Self::watch_idle`] and the beginning of the next
    /// one, copies of its inputs included; ends the measurement.
    ///
    /// # Errors
    /// If the device fails.
    pub fn idle(&mut self) -> Result<Vec<f32>, StepError> {
        let times = self.model.device.marked().map_err(|error| StepError(error.to_string()))?;
        // Two marks a step: every second pair is of one step's end and the next one's beginning.
        Ok(times.into_iter().skip(1).step_by(2).collect())
    }
}
