//! The forward pass as a list of launches: the CPU's `decoder.rs` with the device's kernels. Launches nothing
//! itself.

use half::bf16;
use keyway_kernels::cuda::matmul::{self, Out, Packed, ProductCut};
use keyway_kernels::cuda::paged_attention::{self, Batch, Pages};
use keyway_kernels::cuda::rms_norm::{self, NormRows};
use keyway_kernels::cuda::rope::{self, Norms, ProjectedTokens};
use keyway_kernels::cuda::sample::SCORE_WORDS;
use keyway_kernels::cuda::{Launch, Slice, elementwise, gather, rules, sample};

use super::heads::HeadShape;
use super::room::{Room, Widths};
use super::sharing::{Load, Sharing};
use super::step::{Attend, GroupStep, Step};
use super::weights::{
    DeviceAttention, DeviceFeedForward, DeviceGrouped, DeviceLayer, DeviceMlp, DeviceWeights,
};
use crate::model::cache_plan::Place;
use crate::model::config::Config;

/// One step on its way through the layers.
pub(super) struct Forward<'a> {
    pub(super) config: &'a Config,
    pub(super) heads: HeadShape,
    pub(super) widths: Widths,
    pub(super) weights: &'a DeviceWeights,
    pub(super) step: &'a Step,
    pub(super) room: &'a Room,
    /// The device's multiprocessors: at most so many blocks of attention are started that stay.
    pub(super) processors: usize,
    /// By slot of the cache plan.
    pub(super) slabs: &'a [Pages],
    pub(super) places: &'a [Place],
    /// Where ranks share the experts, and all ranks' tokens.
    pub(super) sharing: Option<(&'a Sharing, &'a Load)>,
    /// The layer it is in.
    pub(super) layer: usize,
    pub(super) launches: Vec<Launch>,
    /// How many rows there still are, and the residual stream's.
    pub(super) rows: usize,
    pub(super) residual: Slice<bf16>,
    /// How many rows' parts are grouped by head; 0: none yet.
    pub(super) rows_by_head: usize,
}

impl Forward<'_> {
    /// Everything from the tokens to the logits, and to the tokens that are drawn.
    pub(super) fn run(mut self) -> Vec<Launch> {
        let (step, weights) = (self.step, self.weights);
        let tokens = step.tokens.of(&self.room.inputs);
        if step.draws.is_some() {
            self.launches.extend(gather::fill_in(tokens, self.room.drawn.whole()));
        }
        self.launches.extend(gather::packed(&weights.embedding, tokens, self.residual));
        for (i, layer) in weights.layers.iter().enumerate() {
            let last = i + 1 == weights.layers.len();
            self.layer = i;
            self.normalise(layer.input_norm, i > 0);
            if !self.attention(i, layer, last) {
                self.serve_others(&layer.feed_forward);
                return self.launches;
            }
            self.normalise(layer.post_norm, true);
            self.feed_forward(&layer.feed_forward);
        }
        self.head();
        self.launches
    }

    /// Adds the last update, if there is one, to the stream, and normalises the stream.
    fn normalise(&mut self, weight: Slice<bf16>, updated: bool) {
        let normed = self.room.normed.slice(0, self.residual.len);
        self.normalise_to(weight, updated, normed);
    }

    fn normalise_to(&mut self, weight: Slice<bf16>, updated: bool, out: Slice<bf16>) {
        let update = self.room.update.slice(0, self.residual.len);
        let (x, residual) = if updated { (update, Some(self.residual)) } else { (self.residual, None) };
        let rows = NormRows::whole(self.rows, self.widths.hidden);
        self.launches.extend(rms_norm::launch(x, residual, weight, self.config.norm_eps, rows, out));
    }

    pub(super) fn product(&mut self, x: Slice<bf16>, weight: &Packed, out: Out) {
        let cut = ProductCut::choose(weight.shape, self.rows);
        let partials = self.room.partials.whole();
        self.launches.extend(matmul::launch(x, self.rows, weight, cut, out, partials));
    }

    /// One layer's attention, from normalised rows to the update. Behind the last layer's keys and values
    /// only rows whose logits are wanted have a purpose: false if there are none.
    fn attention(&mut self, i: usize, layer: &DeviceLayer, last: bool) -> bool {
        let Widths { hidden, queries, .. } = self.widths;
        let (step, place) = (self.step, self.places[i]);
        let (group, pages) = (&step.groups[place.group], &self.slabs[place.slot]);
        let ((mut q, mut q_stride), sinks) = match &layer.attention {
            DeviceAttention::Grouped(grouped) => (self.queries(grouped, group, pages), grouped.sinks),
            DeviceAttention::Latent(latent) => (self.latent_queries(latent, group, pages), None),
        };
        let mut attend = &group.all;
        if last && !step.all_wanted {
            let Some(wanted) = &group.wanted else { return false };
            let rows = step.wanted.of(&self.room.inputs);
            self.rows = step.wanted_rows;
            let all = q;
            q = self.room.queries.slice(0, self.rows * queries);
            let kept = self.room.kept.slice(0, self.rows * hidden);
            self.launches.extend(gather::plain(all, q_stride, rows, queries, q));
            self.launches.extend(gather::plain(self.residual, hidden, rows, hidden, kept));
            (q_stride, attend, self.residual) = (queries, wanted, kept);
        }
        let window = self.config.layers[i].window;
        let attended = self.attend(sinks, (q, q_stride), (group, attend), pages, window);
        let update = self.room.update.slice(0, self.rows * hidden);
        match &layer.attention {
            DeviceAttention::Grouped(grouped) => self.product(attended, &grouped.output, Out::Bf16(update)),
            DeviceAttention::Latent(latent) => self.latent_output(latent, attended, update),
        }
        true
    }

    /// Turned queries of every row, normalised where the model does so, and keys and values to their pages.
    /// Distance between rows as well.
    fn queries(&mut self, layer: &DeviceGrouped, group: &GroupStep, pages: &Pages) -> (Slice<bf16>, usize) {
        let (heads, stride) = (self.heads.heads, self.widths.qkv);
        let qkv = self.room.qkv.slice(0, self.rows * stride);
        self.product(self.room.normed.slice(0, self.rows * self.widths.hidden), &layer.qkv, Out::Bf16(qkv));
        let inputs = &self.room.inputs;
        let tokens = ProjectedTokens {
            x: qkv,
            stride,
            kv: None,
            heads,
            norms: layer.qk_norm.map(|[queries, keys]| Norms { queries, keys, eps: self.config.norm_eps }),
            angles: self.step.angles.map(|part| part.of(inputs).cast()),
            rotated_from: 0,
            pairing: self.config.rope.pairing,
            slots: group.slots.of(inputs),
        };
        self.launches.extend(rope::launch(&tokens, pages, [1.0; 2]));
        (qkv, stride)
    }

    fn attend(
        &mut self,
        sinks: Option<Slice<f32>>,
        (q, q_stride): (Slice<bf16>, usize),
        (group, attend): (&GroupStep, &Attend),
        pages: &Pages,
        window: Option<usize>,
    ) -> Slice<bf16> {
        let inputs = &self.room.inputs;
        let out = self.room.attended.slice(0, self.rows * self.widths.attended);
        let batch = Batch {
            plan: &attend.plan,
            items: attend.items.of(inputs),
            merges: attend.merges.of(inputs),
            tables: group.tables.of(inputs),
            q,
            q_stride,
            heads: self.heads.heads,
            sinks,
            window,
            unit: self.weights.embedding.unit,
            processors: self.processors,
            scale: self.heads.scale,
            kv_scale: [1.0; 2],
            out,
            partials: self.room.partials.whole(),
        };
        self.launches.extend(paged_attention::launch(pages, &batch));
        out
    }

    /// From normalised rows to the update.
    fn feed_forward(&mut self, feed_forward: &DeviceFeedForward) {
        let len = self.rows * self.widths.hidden;
        match feed_forward {
            DeviceFeedForward::Dense(mlp) => {
                self.mlp(mlp, self.room.normed.slice(0, len), self.room.update.slice(0, len));
            }
            DeviceFeedForward::Experts(experts) => self.experts(experts),
        }
    }

    /// Runs one gated network on the step's rows, from `x` to `out`.
    pub(super) fn mlp(&mut self, mlp: &DeviceMlp, x: Slice<bf16>, out: Slice<bf16>) {
        let (rows, width) = (self.rows, mlp.down.shape.inputs);
        let gate_up = self.room.gate_up.slice(0, rows * 2 * width);
        let gated = self.room.gated.slice(0, rows * width);
        self.product(x, &mlp.gate_up, Out::Bf16(gate_up));
        self.launches.extend(elementwise::silu_mul(gate_up, width, gated));
        self.product(gated, &mlp.down, Out::Bf16(out));
    }

    /// Final hidden states and logits, into the step's output; what is drawn from them.
    fn head(&mut self) {
        let Widths { hidden, vocab, .. } = self.widths;
        let normed = self.room.output.slice(0, self.rows * hidden);
        let logits = self.room.output.slice(self.rows * hidden * size_of::<bf16>(), self.rows * vocab);
        self.normalise_to(self.weights.norm, true, normed);
        self.product(normed, &self.weights.head, Out::F32(logits));
        if let Some(rows) = self.step.rules {
            let inputs = &self.room.inputs;
            let (rows, lists) = (rows.of(inputs), self.room.rules.lists());
            let masks = self.step.masks.map_or(rows, |masks| masks.of(inputs));
            let tokens = self.step.tokens.of(inputs);
            self.launches.extend(rules::launch(logits, vocab, rows, lists, masks, tokens));
        }
        if let Some(draws) = self.step.draws {
            let (by, rows) = (draws.of(&self.room.inputs), self.rows);
            let (drawn, logprobs) = (self.room.drawn.slice(0, rows), self.room.logprobs.slice(0, rows));
            // Products, which have their partial sums there, are done.
            let work = self.room.partials.slice(0, sample::work_words(rows, vocab));
            self.launches.extend(sample::launch(logits, vocab, by, work, drawn, logprobs));
            if let Some(wanted) = self.step.scores {
                let scores = self.room.scores.slice(0, rows * SCORE_WORDS);
                self.launches.extend(sample::score(
                    logits,
                    vocab,
                    wanted.of(&self.room.inputs),
                    work,
                    drawn,
                    scores,
                ));
            }
        }
    }
}
