//! What a newcomer is told, for whom the gateway has started workers of its own.

use std::net::SocketAddr;

use crate::config::WorkerConfig;

/// Says on stderr which workers were started, and what to try.
pub(super) fn welcome(
    (addr, admin): (SocketAddr, SocketAddr),
    workers: &[WorkerConfig],
    model: Option<&str>,
) {
    let names: Vec<String> = workers.iter().map(WorkerConfig::name).collect();
    eprintln!(
        "\nNo worker is configured, so keyway started {count} embedded CPU workers ({names}) with the built-in model,\n\
         which answers questions about Keyway.\n\
         Put it before your own with: keyway --worker http://HOST:PORT --worker …\n\n\
         Try:\n  curl http://{addr}/v1/chat/completions -H 'content-type: application/json' \\\n    \
         -d '{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"user\",\"content\":\"How do I add a worker?\"}}],\"stream\":true}}' -N\n  \
         curl http://{admin}/workers\n\n\
         The operators' page is at http://{admin}/\n\
         With --expose each answer says in its headers which worker served it, and why.\n",
        count = workers.len(),
        names = names.join(", "),
        model = model.unwrap_or("keyway-builtin"),
    );
}
