//! `keyway-loadtest calibrate`: how fast one idle server is: the time to a first token by prompt length, what
//! is left of it when the prompt is cached, and the time of a token. One request at a time; judges nothing.

use std::{
    fmt::Write as _,
    process::ExitCode,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use bytes::Bytes;
use serde::Serialize;
use tokio::{runtime::Builder, sync::watch};

use crate::{
    args::calibrate::CalibrateArgs,
    client::{
        self, Server,
        calibrate::{Calibration, calibrate},
        exchange::{Clock, Session, exchange},
        record::{Exchange, Outcome},
    },
    error::Error,
    stdout,
    workload::{Ask, body::Bodies, scale::Block},
};

/// Tokens of the blocks that prompts are made of.
const BLOCK_TOKENS: u32 = 512;
/// Seed of the prompts: one that no run has by default.
const SEED: u64 = 0xca11;

/// What was measured. Times in milliseconds.
#[derive(Debug, Serialize)]
pub struct Speed {
    /// Name of the model: that of `--model`, else the first that the server lists.
    pub model: String,
    /// One for each length, in order.
    pub lengths: Vec<Length>,
    /// Time to the first token of a prompt without length: the line through the medians at 0 tokens.
    pub floor_ms: f64,
    /// Prompt tokens a second beyond that: the line's slope.
    pub prefill_tokens_per_s: f64,
    /// A generated token after the first, with nothing else running.
    pub tpot_ms: Option<f64>,
}

/// Prompts of one length.
#[derive(Debug, Serialize)]
pub struct Length {
    /// Prompt tokens by the server's count, the mean.
    pub prompt_tokens: f64,
    /// Median time to the first token.
    pub ttft_ms: f64,
    /// The same when the very prompt was sent just before.
    pub repeated_ttft_ms: f64,
    /// Share of the repeated prompt that came from the cache; null if the server does not say.
    pub repeated_cached: Option<f64>,
}

/// Measures one server, then prints the figures as text, or as JSON with `--json`.
pub fn run(args: &CalibrateArgs) -> Result<ExitCode, Error> {
    let speed = Builder::new_current_thread().enable_all().build()?.block_on(measure(args))?;
    if args.json {
        // Numbers and names always serialise.
        stdout::print(&(serde_json::to_string_pretty(&speed).unwrap_or_default() + "\n"))
    } else {
        stdout::print(&speed.render())
    }
}

async fn measure(args: &CalibrateArgs) -> Result<Speed, Error> {
    let server = &args.server;
    if !server.endpoint().generates() {
        let text = "embeddings have no first token and none after it: write another --endpoint";
        return Err(Error::Usage(text.into()));
    }
    let key = server.api_key_file.as_deref().map(client::read_api_key).transpose()?;
    let to = Server::new(&server.url(), key.as_deref())?.with_headers(&server.header)?;
    let model = match &server.model {
        Some(model) => model.clone(),
        None => to.first_model(server.timeout).await?,
    };
    let ratio = calibrate(&to, server.endpoint(), &model, SEED, BLOCK_TOKENS, server.timeout).await?;
    let bodies = Bodies::new(server.endpoint(), &model, true, SEED, ratio.bytes_per_token);
    // The clock makes the prompts new ones, which no cache holds from an earlier calibration.
    let mut id = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_micros() as u64) << 8;
    let (mut lengths, mut tpots) = (Vec::new(), Vec::new());
    for &tokens in &args.lengths {
        let (mut fresh, mut repeated) = (Vec::new(), Vec::new());
        for _ in 0..args.samples {
            let body = Bytes::from(bodies.make(&prompt(tokens, u64::from(args.osl), &mut id), None));
            fresh.push(send(args, &to, body.clone()).await?);
            repeated.push(send(args, &to, body).await?);
        }
        tpots.extend(fresh.iter().filter_map(tpot_ms));
        lengths.push(Length::new(&fresh, &repeated, &ratio, tokens));
    }
    let (floor_ms, ms_per_token) = line(&lengths);
    Ok(Speed {
        model,
        lengths,
        floor_ms,
        prefill_tokens_per_s: if ms_per_token > 0.0 { 1e3 / ms_per_token } else { 0.0 },
        tpot_ms: median(tpots),
    })
}

/// A prompt of blocks that no request has sent before; `id` goes up by one for each block.
fn prompt(tokens: u32, output_tokens: u64, id: &mut u64) -> Ask {
    let mut blocks = Vec::new();
    let mut left = tokens;
    while left > 0 {
        *id += 1;
        blocks.push(Block { id: *id & (u64::MAX >> 4), tokens: left.min(BLOCK_TOKENS) });
        left -= left.min(BLOCK_TOKENS);
    }
    Ask { blocks, output_tokens, said: None, begins_history: false }
}

async fn send(args: &CalibrateArgs, server: &Server, body: Bytes) -> Result<Exchange, Error> {
    let (_keep, stop) = watch::channel(false);
    let (server, endpoint, timeout) = (server.clone(), args.server.endpoint(), args.server.timeout);
    let clock = Clock { zero: Instant::now() };
    let session = Session { server, endpoint, texts: 1, timeout, clock, keep_text: false, stop };
    let exchange = exchange(&session, body.into()).await;
    match &exchange.outcome {
        Outcome::Failed(failure) => Err(Error::Failed(failure.to_string())),
        Outcome::Ok | Outcome::Cancelled => Ok(exchange),
    }
}

fn ttft_ms(exchange: &Exchange) -> Option<f64> {
    Some(exchange.first_ns?.saturating_sub(exchange.sent_ns) as f64 / 1e6)
}

fn tpot_ms(exchange: &Exchange) -> Option<f64> {
    let tokens = exchange.usage.as_ref()?.completion_tokens;
    let ns = exchange.last_ns?.saturating_sub(exchange.first_ns?);
    (tokens >= 2).then(|| ns as f64 / (tokens - 1) as f64 / 1e6)
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// Least squares through the medians: time at 0 tokens, at least 0, and time for one more.
fn line(lengths: &[Length]) -> (f64, f64) {
    let n = lengths.len() as f64;
    let mean = |of: fn(&Length) -> f64| lengths.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(|l| l.prompt_tokens), mean(|l| l.ttft_ms));
    let spread: f64 = lengths.iter().map(|l| (l.prompt_tokens - x).powi(2)).sum();
    let together: f64 = lengths.iter().map(|l| (l.prompt_tokens - x) * (l.ttft_ms - y)).sum();
    if spread == 0.0 {
        return (0.0, y / x.max(1.0));
    }
    let slope = together / spread;
    ((y - slope * x).max(0.0), slope)
}

// === impl Length ===

impl Length {
    fn new(fresh: &[Exchange], repeated: &[Exchange], ratio: &Calibration, wanted: u32) -> Self {
        let told: Vec<u64> = fresh.iter().filter_map(|e| Some(e.usage.as_ref()?.prompt_tokens)).collect();
        let mean = told.iter().sum::<u64>() as f64 / told.len().max(1) as f64;
        let cached = |e: &Exchange| {
            let usage = e.usage.as_ref()?;
            Some(usage.cached_tokens()? as f64 / usage.prompt_tokens.max(1) as f64)
        };
        Self {
            prompt_tokens: if told.is_empty() {
                f64::from(wanted) + ratio.overhead_tokens as f64
            } else {
                mean
            },
            ttft_ms: median(fresh.iter().filter_map(ttft_ms).collect()).unwrap_or(0.0),
            repeated_ttft_ms: median(repeated.iter().filter_map(ttft_ms).collect()).unwrap_or(0.0),
            repeated_cached: median(repeated.iter().filter_map(cached).collect()),
        }
    }
}

// === impl Speed ===

impl Speed {
    fn render(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "{}\n\n{:>14}{:>12}{:>18}{:>9}",
            self.model, "prompt tokens", "TTFT ms", "repeated TTFT", "cached"
        )?;
        for length in &self.lengths {
            let cached =
                length.repeated_cached.map_or_else(|| "-".into(), |share| format!("{:.1} %", share * 100.0));
            writeln!(
                out,
                "{:>14.0}{:>12.1}{:>18.1}{cached:>9}",
                length.prompt_tokens, length.ttft_ms, length.repeated_ttft_ms
            )?;
        }
        writeln!(out, "\nTTFT floor       {:.1} ms", self.floor_ms)?;
        writeln!(out, "prefill          {:.0} tokens/s", self.prefill_tokens_per_s)?;
        let tpot = self
            .tpot_ms
            .map_or_else(|| "-".into(), |ms| format!("{ms:.2} ms, {:.0} tokens/s", 1e3 / ms.max(1e-6)));
        writeln!(out, "a token alone    {tpot}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_found_and_prompts_are_new() {
        let length = |prompt_tokens: f64| Length {
            prompt_tokens,
            ttft_ms: 12.0 + prompt_tokens * 0.05,
            repeated_ttft_ms: 12.0,
            repeated_cached: None,
        };
        let (floor, slope) = line(&[length(256.0), length(1024.0), length(4096.0)]);
        assert!((floor - 12.0).abs() < 1e-9 && (slope - 0.05).abs() < 1e-12, "{floor} {slope}");
        assert_eq!(line(&[length(100.0)]), (0.0, 17.0 / 100.0));
        let mut id = 0;
        let (a, b) = (prompt(1300, 1, &mut id), prompt(512, 1, &mut id));
        assert_eq!((a.prompt_tokens(), a.blocks.len(), b.blocks.len()), (1300, 3, 1));
        assert!(a.blocks.iter().all(|block| block.id != b.blocks[0].id));
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(Vec::new())), (Some(2.0), None));
    }
}
