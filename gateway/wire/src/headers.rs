//! Names of the HTTP headers that Keyway's parts give each other. Not the place for values or parsing.

/// Identifies one request in logs, errors and answers; the client's own value is kept.
pub const REQUEST_ID: &str = "x-request-id";
/// The same in answers of Anthropic's API, whose clients look for it there.
pub const ANTHROPIC_REQUEST_ID: &str = "request-id";
/// Says which version of Anthropic's API a client speaks: that it speaks that one.
pub const ANTHROPIC_VERSION: &str = "anthropic-version";
/// Which worker answered: its address as `host:port`.
pub const WORKER: &str = "x-keyway-worker";
/// Why that worker was chosen: a `keyway_core` pick reason, such as `prefix` or `round-robin`.
pub const REASON: &str = "x-keyway-reason";
/// Prompt tokens the gateway expected the worker to hold already.
pub const MATCHED_TOKENS: &str = "x-keyway-matched-tokens";
/// Which model a request went to, where its client named another: an alias, or one that others stand in for.
pub const MODEL: &str = "x-keyway-model";
/// Which of several data-parallel engines behind one address is to take the request (vLLM, SGLang).
pub const DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";
/// A request's place among those that wait for a worker: a whole number, of which higher ones go first. It
/// may lower what its tenant's requests have.
pub const PRIORITY: &str = "x-keyway-priority";
/// The time to first token that a request wants, in milliseconds.
pub const TTFT_OBJECTIVE: &str = "x-keyway-slo-ttft-ms";
/// What is left of a tenant's budgets, once it is warned of them: `tokens_per_day=1200, cost_per_month=0.35`.
pub const BUDGET_LEFT: &str = "x-keyway-budget-left";
/// Fields of a request that the worker took and did not act on, by their names.
pub const IGNORED: &str = "x-keyway-ignored";
/// The numerics id of the worker that answered: equal ids mean equal logits, bit for bit.
pub const NUMERICS_ID: &str = "x-keyway-numerics-id";
