//! Options under the names that people know from `vllm bench serve` and AIPerf, where more than an alias is
//! needed: some mean something that is written otherwise here, and one that cannot be honoured is an error
//! that says what to write. Hidden from `--help`. Plain aliases stand with the options they name.

use clap::Args as ClapArgs;

use crate::workload::{
    body::Endpoint,
    dist::{Dist, Tokens},
};

/// Where vLLM's client looks for a server, if its options name only one of both.
const HOST: &str = "127.0.0.1";
const PORT: u16 = 8000;
/// Percentiles that every report has.
const PERCENTILES: [&str; 4] = ["50", "90", "95", "99"];
const METRICS: [&str; 4] = ["ttft", "tpot", "itl", "e2el"];

/// An option that is never accepted: reading its value fails.
#[derive(Debug, Clone, Copy)]
pub enum Never {}

fn never(instead: &'static str) -> impl Fn(&str) -> Result<Never, String> + Clone + Send + Sync {
    move |_| Err(instead.into())
}

/// The server, in two parts.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct OtherToolsServer {
    /// The server's name or address
    #[arg(long, hide = true, conflicts_with = "url")]
    host: Option<String>,
    /// Its port
    #[arg(long, hide = true, conflicts_with = "url")]
    port: Option<u16>,
    /// A tokenizer, a flag of its loader, or its mode
    #[arg(long, hide = true, aliases = ["tokenizer-mode", "tokenizer-revision"])]
    tokenizer: Option<String>,
    /// The kind of the server, which vLLM's and SGLang's clients choose the API by
    #[arg(long, hide = true, value_parser = backend)]
    pub(super) backend: Option<Endpoint>,
}

impl OtherToolsServer {
    /// What to say of an option that has no effect.
    pub fn remark(&self) -> Option<String> {
        let said = "--tokenizer is not needed: prompts are as long as the server's own counts say";
        self.tokenizer.is_some().then(|| said.into())
    }

    /// The base URL that both parts make.
    pub(super) fn url(&self) -> String {
        let host = self.host.as_deref().unwrap_or(HOST);
        let is_v6 = host.contains(':') && !host.starts_with('[');
        let host = if is_v6 { format!("[{host}]") } else { host.into() };
        format!("http://{host}:{}", self.port.unwrap_or(PORT))
    }
}

/// How lengths vary.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct Lengths {
    /// Lengths are even between (1 - R) and (1 + R) times --isl and --osl
    #[arg(long, hide = true, value_name = "R", value_parser = ratio)]
    random_range_ratio: Option<f64>,
    /// The standard deviation of AIPerf's lengths
    #[arg(long, hide = true, aliases = ["isl-stddev", "prompt-input-tokens-stddev"],
          value_parser = never("write --isl 'normal(MEAN,SD)'"))]
    synthetic_input_tokens_stddev: Option<Never>,
    /// The same of its answers
    #[arg(long, hide = true, alias = "osl-stddev", value_parser = never("write --osl 'normal(MEAN,SD)'"))]
    output_tokens_stddev: Option<Never>,
    /// A prefix that all prompts of vLLM's random workload share
    #[arg(long, hide = true,
          value_parser = never("write --workload shared-prefix --prefix-groups 1 --prefix-len TOKENS"))]
    random_prefix_len: Option<Never>,
}

impl Lengths {
    /// `tokens`, spread as `--random-range-ratio` says; a distribution stays what it is.
    pub fn spread(&self, tokens: Tokens) -> Tokens {
        match (self.random_range_ratio, tokens.0) {
            (Some(ratio), Dist::Fixed(mean)) => {
                Tokens(Dist::Uniform((mean * (1.0 - ratio)).floor().max(1.0), (mean * (1.0 + ratio)).ceil()))
            }
            _ => tokens,
        }
    }
}

/// Rates that change.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct Rates {
    /// vLLM ramps by the number of requests sent
    #[arg(long, hide = true, aliases = ["ramp-up-start-rps", "ramp-up-end-rps"],
          value_parser = never("rates ramp over time here: write --rate-shape 1..20@60s"))]
    ramp_up_strategy: Option<Never>,
}

/// What comes out.
#[derive(Debug, Clone, Default, ClapArgs)]
pub struct OtherToolsOutput {
    /// Answers are always streamed
    #[arg(long, hide = true)]
    streaming: bool,
    /// With a folder, results are always saved
    #[arg(long, hide = true, requires = "dir")]
    save_result: bool,
    /// Figures to report; all of them always are
    #[arg(long, hide = true, value_delimiter = ',', value_parser = METRICS)]
    percentile_metrics: Vec<String>,
    /// Percentiles to report; these always are
    #[arg(long, hide = true, value_delimiter = ',', value_parser = PERCENTILES)]
    metric_percentiles: Vec<String>,
    /// The name of the results' file
    #[arg(long, hide = true, value_parser = never("write -o DIR: the results are in DIR/run.json"))]
    result_filename: Option<Never>,
}

/// The API that a backend of `vllm bench serve` or SGLang's client stands for.
fn backend(text: &str) -> Result<Endpoint, String> {
    match text {
        "vllm" | "openai" | "sglang" | "sglang-oai" | "lmdeploy" | "llama.cpp" => Ok(Endpoint::Completions),
        "openai-chat" | "vllm-chat" | "sglang-oai-chat" | "lmdeploy-chat" => Ok(Endpoint::Chat),
        "openai-embeddings" | "sglang-embedding" => Ok(Endpoint::Embeddings),
        _ => Err("only servers of OpenAI's and Anthropic's APIs can be measured: write --endpoint chat, completions, \
                  responses, messages or embeddings"
            .into()),
    }
}

/// At least 0 and below 1.
fn ratio(text: &str) -> Result<f64, String> {
    let value = text.trim().parse().ok().filter(|value| (0.0..1.0).contains(value));
    value.ok_or_else(|| format!("`{text}` is not a number from 0 to below 1"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use crate::{
        args::{Args, Command, run::RunArgs},
        workload::body::Endpoint,
    };

    fn run(line: &str) -> Result<RunArgs, String> {
        let line = format!("keyway-loadtest run {line}");
        match Args::try_parse_from(line.split_whitespace()).map_err(|error| error.to_string())?.command {
            Command::Run(args) => Ok(*args),
            _ => unreachable!(),
        }
    }

    #[test]
    fn a_server_in_two_parts() {
        assert_eq!(run("--host gpu7 --port 9000").unwrap().server.url(), "http://gpu7:9000");
        assert_eq!(run("--host ::1").unwrap().server.url(), "http://[::1]:8000");
        assert_eq!(run("--port 81").unwrap().server.url(), "http://127.0.0.1:81");
        assert!(run("--port 81 --url http://h").is_err());
        assert!(run("").unwrap_err().contains("--url"));
    }

    #[test]
    fn an_api_by_its_name_its_path_or_another_tool_s_backend() {
        let of = |line: &str| run(&format!("--url h:1 {line}")).unwrap().server.endpoint();
        assert_eq!((of(""), of("--backend openai-chat")), (Endpoint::Chat, Endpoint::Chat));
        assert_eq!(
            (of("--backend vllm"), of("--endpoint /v1/completions")),
            (Endpoint::Completions, of("--backend sglang"))
        );
        assert_eq!(of("--backend vllm --endpoint /v1/chat/completions"), Endpoint::Chat);
        assert_eq!(of("--endpoint messages"), Endpoint::Messages);
        assert_eq!(run("--url h:1").unwrap().server.url(), "http://h:1");
        assert_eq!(run("--url https://h").unwrap().server.url(), "https://h");
    }

    #[test]
    fn lengths_around_a_mean() {
        let workload =
            run("--url http://h --random-input-len 100 --random-range-ratio 0.25").unwrap().workload;
        assert_eq!(workload.isl().to_string(), "uniform(75,125)");
        assert_eq!(workload.osl().to_string(), "uniform(96,160)");
        assert!(run("--url http://h --random-range-ratio 1").is_err());
        assert_eq!(run("--url http://h --isl exp(9)").unwrap().workload.isl().to_string(), "exp(9)");
    }

    #[test]
    fn what_cannot_be_honoured_says_what_to_write() {
        for (line, instead) in [
            ("--ramp-up-strategy linear", "--rate-shape"),
            ("--ramp-up-start-rps 1", "--rate-shape"),
            ("--backend tgi", "--endpoint chat"),
            ("--synthetic-input-tokens-stddev 9", "--isl 'normal"),
            ("--osl-stddev 9", "--osl 'normal"),
            ("--random-prefix-len 9", "--prefix-len"),
            ("--result-filename a.json", "-o DIR"),
            ("--metric-percentiles 42", "50, 90, 95, 99"),
            ("--percentile-metrics power", "ttft, tpot, itl, e2el"),
        ] {
            let error = run(&format!("--url http://h {line}")).unwrap_err();
            assert!(error.contains(instead), "{line}: {error}");
        }
        assert!(run("--url http://h --percentile-metrics ttft,itl --metric-percentiles 50,99").is_ok());
    }
}
