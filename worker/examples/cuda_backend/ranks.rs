//! Ranks that share a model's experts, all on one GPU and in one process: every logit's bits are those of the
//! model without ranks, for prompts in one round of the exchange and in many, and for recorded steps. Ranks
//! in processes of their own are `kernels/examples/check`'s case `peer_processes`.

use keyway_kernels::cuda::Device;
use keyway_worker::model::{CudaModel, KvLayout, LoadedModel, Quantize};

use crate::cases::{generate, text};
use crate::driver::Driver;
use crate::models::{MODELS, VOCAB};
use crate::shapes::{QWEN3_30B, VOCAB as VOCAB_PUBLISHED};

/// The names of all cases in which one process plays several ranks, as [`run`] takes them.
pub(crate) const NAMES: &[&str] = &["backend_ranks_small", "backend_ranks_30b_layers"];

const LAYOUT: KvLayout = KvLayout { block_size: 16, num_blocks: 251 };
/// How many ranks, and tokens of a round.
const GROUPS: [(usize, usize); 3] = [(2, 16), (2, 512), (4, 512)];

/// Runs one; `device` opens the device anew for each model. How many logits were compared.
pub(crate) fn run<D: Device + Send>(
    name: &str,
    device: impl Fn() -> Result<D, String>,
) -> Result<usize, String> {
    if name == "backend_ranks_30b_layers" {
        // Its products are the whole model's; four layers take seconds to make.
        let config = QWEN3_30B.config.replace(r#""num_hidden_layers": 48"#, r#""num_hidden_layers": 4"#);
        let model = || CudaModel::synthetic(&config, device()?, Quantize::None).map_err(text);
        return same_bits(model, VOCAB_PUBLISHED);
    }
    let mut compared = 0;
    for variant in MODELS.iter().filter(|variant| variant.has_experts()) {
        let model = || {
            let loaded = LoadedModel::synthetic(&variant.config()).map_err(text)?;
            loaded.onto(device()?, Quantize::None).map_err(text)
        };
        compared += same_bits(model, VOCAB).map_err(|fault| format!("{}: {fault}", variant.name))?;
    }
    Ok(compared)
}

/// Prompts side by side in pieces, and greedily chosen tokens behind them, without ranks and with each group.
fn same_bits<D: Device + Send>(
    model: impl Fn() -> Result<CudaModel<D>, String>,
    vocab: u32,
) -> Result<usize, String> {
    let prompts: Vec<Vec<u32>> =
        [(300, 7), (41, 11), (16, 17)].map(|(len, step)| (0..len).map(|i| i * step % vocab).collect()).into();
    let said = |model: CudaModel<D>| {
        let mut driver = Driver::new(model.into_backend(LAYOUT).map_err(text)?, 1);
        let rows = generate(&mut driver, &prompts, 96)?;
        Ok::<_, String>(rows.concat().concat())
    };
    let expected = said(model()?)?;
    for (ranks, round) in GROUPS {
        let found = said(model()?.with_ranks_here(ranks, round).map_err(text)?)?;
        let differs = found.iter().zip(&expected).position(|(a, b)| a.to_bits() != b.to_bits() || a.is_nan());
        if let Some(at) = differs {
            let (a, b) = (found[at], expected[at]);
            return Err(format!("{ranks} ranks, rounds of {round}: logit {at} is {a:e} instead of {b:e}"));
        }
        if found.len() != expected.len() {
            return Err(format!("{ranks} ranks: {} logits instead of {}", found.len(), expected.len()));
        }
    }
    Ok(GROUPS.len() * expected.len())
}
