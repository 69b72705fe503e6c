//! The options of `simulate` for sessions of agents: how many go on, and what those are like that are drawn.

use clap::Args;

use crate::{
    error::Error,
    limits::LENGTH_TOKENS_MAX,
    workload::{
        agents::Agents,
        dist::{Seconds, Tokens},
    },
};

/// Sessions of agents, of a trace that tells them or drawn.
#[derive(Debug, Args)]
pub struct SessionArgs {
    /// Draw N sessions of agents, in place of a trace
    #[arg(long = "agents", value_name = "N", conflicts_with = "trace", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    drawn: Option<u32>,
    /// Let a turn of a trace come when the answers that it goes on from have ended and its tools are done,
    /// however long the answers took; --agents and the other options of sessions do that too
    #[arg(long)]
    live: bool,
    /// Sessions that go on at once, the next of which begins where one ends; otherwise each begins when it
    /// did, and all that are drawn at once
    #[arg(long = "sessions", value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub at_once: Option<u32>,
    /// Keep answers cached as prompts are, as far as a later turn goes on from them; otherwise that computes
    /// them again
    #[arg(long)]
    pub cache_answers: bool,
    /// Let clients say their session's name; otherwise a conversation is known by its first message
    #[arg(long = "session-names")]
    pub names: bool,
    /// Say as well what no placement could beat, which keeps all prompts in memory
    #[arg(long)]
    pub optimum: bool,
    /// Say as well how much more the best of N placements would have found that are tried afterwards
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub hindsight: Option<u32>,
    #[command(flatten)]
    drawn_as: DrawnArgs,
}

/// What drawn sessions are like. Lengths and times as of `run`: a number, uniform(LOW,HIGH),
/// lognormal(MEAN,SD), exp(MEAN).
#[derive(Debug, Args)]
struct DrawnArgs {
    /// Turns of a session's first agent
    #[arg(long, value_name = "TURNS", default_value = "20", requires = "drawn")]
    turns: Tokens,
    /// Tokens that each turn adds, besides the answer before it
    #[arg(long, value_name = "TOKENS", default_value = "600", requires = "drawn")]
    isl: Tokens,
    /// Tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value = "60", requires = "drawn")]
    osl: Tokens,
    /// Time between an answer's end and the next turn, in which tools run
    #[arg(long, value_name = "TIME", default_value = "exp(2s)", requires = "drawn")]
    think_time: Seconds,
    /// Share of turns after which a slow tool runs
    #[arg(long, value_name = "SHARE", default_value = "0", requires = "drawn", value_parser = share)]
    slow: f64,
    /// Time that a slow tool takes, in place of --think-time
    #[arg(long, value_name = "TIME", default_value = "20s", requires = "drawn")]
    slow_time: Seconds,
    /// Tokens that all agents of a group begin with: system prompt and tools
    #[arg(long, value_name = "TOKENS", default_value_t = 2_000, requires = "drawn",
          value_parser = clap::value_parser!(u32).range(0..=i64::from(LENGTH_TOKENS_MAX)))]
    prefix_len: u32,
    /// Groups of sessions that begin alike
    #[arg(long, value_name = "N", default_value_t = 1, requires = "drawn", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    prefix_groups: u32,
    /// Share of turns that start sub-agents, which the next turn waits for
    #[arg(long, value_name = "SHARE", default_value = "0", requires = "drawn", value_parser = share)]
    spawns: f64,
    /// Sub-agents that such a turn starts
    #[arg(long, value_name = "N", default_value = "3", requires = "drawn")]
    sub_agents: Tokens,
    /// Turns of a sub-agent
    #[arg(long, value_name = "TURNS", default_value = "5", requires = "drawn")]
    sub_turns: Tokens,
}

impl SessionArgs {
    /// An option that was given and says something of sessions, whatever they come from.
    pub fn of_sessions(&self) -> Option<&'static str> {
        let given = [
            (self.live, "--live"),
            (self.at_once.is_some(), "--sessions"),
            (self.cache_answers, "--cache-answers"),
            (self.names, "--session-names"),
            (self.optimum, "--optimum"),
            (self.hindsight.is_some(), "--hindsight"),
        ];
        given.into_iter().find_map(|(given, option)| given.then_some(option))
    }

    /// Whether turns wait for the answers that they go on from.
    pub fn is_live(&self) -> bool {
        self.drawn.is_some() || self.of_sessions().is_some()
    }

    /// What is drawn.
    ///
    /// # Errors
    /// None are to be drawn.
    pub fn agents(&self, seed: u64) -> Result<Agents, Error> {
        let wanted = || Error::Usage("give --trace FILE, or --agents N".into());
        let drawn = &self.drawn_as;
        Ok(Agents {
            seed,
            sessions: self.drawn.ok_or_else(wanted)?,
            turns: drawn.turns,
            input: drawn.isl,
            output: drawn.osl,
            think: drawn.think_time,
            slow: (drawn.slow, drawn.slow_time),
            prefix_tokens: drawn.prefix_len,
            groups: drawn.prefix_groups,
            spawns: drawn.spawns,
            sub_agents: drawn.sub_agents,
            sub_turns: drawn.sub_turns,
        })
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share: f64 = text.parse().map_err(|_| format!("`{text}` is no number"))?;
    (0.0..=1.0).contains(&share).then_some(share).ok_or_else(|| format!("{text} is no share: 0 to 1"))
}
