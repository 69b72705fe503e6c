//! What engines offer beside `/v1/`: requests that are passed on, all of them for a model.

/// By the names that vLLM and SGLang both give or one of them does.
pub const ENGINE_PATHS: [&str; 9] = [
    "/tokenize",
    "/detokenize",
    "/rerank",
    "/v2/rerank",
    "/score",
    "/classify",
    "/pooling",
    "/generate",
    "/inference/v1/generate",
];
