//! The feed-forward part of a layer, as it is stored: one network, experts apart, or experts fused.

use keyway_kernels::quant::MXFP4_BLOCK;

use super::Loader;
use crate::model::ModelError;
use crate::model::config::{ExpertNames, Experts, FeedForward, Quantisation, refuse};
use crate::model::experts::Bank;
use crate::model::stored::{Rows, Stored, pack};
use crate::model::tensor::Tensor;
use crate::model::weights::{ExpertsWeights, FeedForwardWeights, Linear, Mlp};

/// Names of the gate, up and down projections of what is no expert.
const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl<'a> Loader<'a> {
    /// `name` is that of the layer's feed-forward part.
    pub(super) fn feed_forward(
        &mut self,
        name: &str,
        layer: usize,
    ) -> Result<FeedForwardWeights, ModelError> {
        match self.config.layers[layer].feed_forward {
            FeedForward::Dense { width } => {
                Ok(FeedForwardWeights::Dense(self.mlp(name, PROJECTIONS, width)?))
            }
            FeedForward::Experts(shape) => {
                Ok(FeedForwardWeights::Experts(Box::new(self.experts(name, layer, shape)?)))
            }
        }
    }

    fn experts(&mut self, name: &str, layer: usize, shape: Experts) -> Result<ExpertsWeights, ModelError> {
        let router = format!("{name}.{}", self.config.names.router);
        let correction_bias = if shape.correction_bias {
            Some(self.vector(&format!("{router}.e_score_correction_bias"), shape.count)?)
        } else {
            None
        };
        let shared = match shape.shared_width {
            Some(width) => Some(self.mlp(&format!("{name}.shared_experts"), PROJECTIONS, width)?),
            None => None,
        };
        let router = self.linear_of(&[(&router, shape.count)], self.config.hidden, shape.biases, None)?;
        let networks = self.networks(&format!("{name}.experts"), layer, shape)?;
        let experts = Bank { hidden: self.config.hidden, gate: shape.gate, networks };
        Ok(ExpertsWeights { shape, router, correction_bias, experts, shared })
    }

    /// The experts that are held here. `name` is that of all experts of the layer.
    pub(super) fn networks(
        &mut self,
        name: &str,
        layer: usize,
        shape: Experts,
    ) -> Result<Vec<Option<Mlp>>, ModelError> {
        let parts = match self.config.names.experts {
            ExpertNames::Apart(parts) => parts,
            ExpertNames::Fused => return self.fused(name, layer, shape),
        };
        let mut expert = |expert: usize| {
            let name = format!("{name}.{expert}");
            if (self.held)(layer, expert) {
                return self.mlp(&name, parts, shape.width).map(Some);
            }
            if self.hash.is_some() {
                self.pass(&name, parts, shape.width)?;
            }
            Ok(None)
        };
        (0..shape.count).map(&mut expert).collect()
    }

    /// Reads a network as [`Loader::mlp`] does, for the hash alone.
    fn pass(&mut self, name: &str, parts: [&str; 3], width: usize) -> Result<(), ModelError> {
        let hidden = self.config.hidden;
        let [gate, up, down] = parts.map(|part| format!("{name}.{part}.weight"));
        for (name, outputs, inputs) in [(gate, width, hidden), (up, width, hidden), (down, hidden, width)] {
            self.stored(&name, outputs, inputs)?;
        }
        Ok(())
    }

    fn mlp(&mut self, name: &str, parts: [&str; 3], width: usize) -> Result<Mlp, ModelError> {
        let [gate, up, down] = parts.map(|part| format!("{name}.{part}"));
        let hidden = self.config.hidden;
        Ok(Mlp {
            gate_up: self.linear(&[(&gate, width), (&up, width)], hidden, false)?,
            down: self.linear(&[(&down, hidden)], width, false)?,
        })
    }

    /// gpt-oss: all experts in one tensor, rows of gate and up in turn.
    fn fused(&mut self, name: &str, layer: usize, shape: Experts) -> Result<Vec<Option<Mlp>>, ModelError> {
        let Experts { count, width, .. } = shape;
        let hidden = self.config.hidden;
        let gate_up = self.fused_matrix(&format!("{name}.gate_up_proj"), count, 2 * width, hidden)?;
        let down = self.fused_matrix(&format!("{name}.down_proj"), count, hidden, width)?;
        let gate_up_bias = self.fused_bias(&format!("{name}.gate_up_proj_bias"), count, 2 * width)?;
        let down_bias = self.fused_bias(&format!("{name}.down_proj_bias"), count, hidden)?;
        let bits = self.bits;
        let expert = |e: usize| {
            let half = |odd| Rows { from: &gate_up, first: 2 * e * width + odd, step: 2, count: width };
            let interleaved = &gate_up_bias[2 * e * width..][..2 * width];
            let bias = |odd: usize| interleaved.iter().skip(odd).step_by(2).copied();
            let down = Rows { from: &down, first: e * hidden, step: 1, count: hidden };
            Mlp {
                gate_up: Linear {
                    weight: pack(&[half(0), half(1)], hidden, bits),
                    bias: Some(bias(0).chain(bias(1)).collect()),
                },
                down: Linear {
                    weight: pack(&[down], width, bits),
                    bias: Some(down_bias[e * hidden..][..hidden].to_vec()),
                },
            }
        };
        let held = self.held;
        Ok((0..count).map(|e| held(layer, e).then(|| expert(e))).collect())
    }

    /// One matrix `[outputs, inputs]` per expert: input-major, or in MXFP4.
    fn fused_matrix(
        &mut self,
        name: &str,
        experts: usize,
        outputs: usize,
        inputs: usize,
    ) -> Result<Stored<'a>, ModelError> {
        if self.config.quantisation != Quantisation::Mxfp4Experts {
            let tensor = self.tensor(name, &[experts, inputs, outputs])?;
            super::number(name, &tensor)?;
            return Ok(Stored::InputMajor { tensor, inputs });
        }
        if !inputs.is_multiple_of(MXFP4_BLOCK) {
            return refuse("quantization_config", format!("{inputs} inputs are no blocks of {MXFP4_BLOCK}"));
        }
        let blocks = inputs / MXFP4_BLOCK;
        let codes = self.codes(&format!("{name}_blocks"), &[experts, outputs, blocks, MXFP4_BLOCK / 2])?;
        Ok(Stored::Mxfp4 {
            // A row's blocks follow each other.
            codes: Tensor { width: inputs / 2, ..codes },
            exponents: self.codes(&format!("{name}_scales"), &[experts, outputs, blocks])?,
        })
    }

    fn fused_bias(&mut self, name: &str, experts: usize, width: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[experts, width])?;
        super::number(name, &tensor)?;
        let mut out = vec![0.0; experts * width];
        for (expert, row) in out.chunks_exact_mut(width).enumerate() {
            tensor.copy_row(expert, row);
        }
        Ok(out)
    }
}
