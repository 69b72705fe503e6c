//! What differs between two configurations, by the file's keys, and which of it a running gateway can take
//! over.

use std::fmt;

use keyway_wire::block_hash::Chain;
use serde::Serialize;

use crate::config::Config;

/// What a reload changed, and what it could not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Changes {
    /// Keys whose new value is in force.
    pub changed: Vec<&'static str>,
    /// Keys whose new value a restart takes over; the old one stays in force.
    pub needs_restart: Vec<&'static str>,
}

/// Adds to a list the keys whose values differ.
macro_rules! differing {
    ($old:ident, $new:ident; $($key:literal: $($field:ident).+),+ $(,)?) => {{
        let mut keys = Vec::new();
        $(if $old.$($field).+ != $new.$($field).+ { keys.push($key); })+
        keys
    }};
}

/// What only a restart takes over, once for both: what is named is kept.
macro_rules! at_the_start {
    ($($key:literal: $($field:ident).+),+ $(,)?) => {
        /// Those of these keys whose values differ.
        fn only_at_the_start(old: &Config, new: &Config) -> Vec<&'static str> {
            differing!(old, new; $($key: $($field).+),+)
        }

        /// Puts the old values back: the process goes on with them.
        fn keep_from_the_start(old: &Config, new: &mut Config) {
            $(new.$($field).+.clone_from(&old.$($field).+);)+
        }
    };
}

at_the_start! {
    "listen": listen,
    "admin_listen": admin_listen,
    "handover_socket": handover_socket,
    "log_format": log_format,
    "routing.block_bytes": routing.block_bytes,
    "routing.index_bytes": routing.index_bytes,
    "routing.hash_key_file": routing.hash_key_file,
    "routing.snapshot_file": routing.snapshot_file,
    "routing.decision_log": routing.decision_log,
    "routing.load_scrape_ms": routing.load_scrape,
    "routing.slow_start_ms": routing.slow_start,
    "routing.find_kv_events": routing.finds_kv_events,
    "routing.fetch_tokens_per_second": routing.fetch_tokens_per_ms,
    "limits.max_cores": limits.max_cores,
    "auth.oidc": oidc,
    "scale": scale,
    "resume": resume,
    "store": store,
    "stored_state": stored_state,
    "traces": traces,
    "usage": usage,
}

impl Changes {
    /// Lists the keys whose values differ; changes nothing. `new` is the configuration just read.
    pub fn between(old: &Config, new: &Config) -> Self {
        let changed = differing!(old, new;
            "worker": workers,
            "policy": policy,
            "model": tokenizers,
            "discovery": discovery,
            "peers": peers,
            "auth.tenants_file": tenants_file,
            "auth.isolate": tenant_rules.isolate,
            "auth.steering": tenant_rules.steering,
            "auth.admin_token_file": admin_token,
            "cors": cors,
            "routing.expose": routing.expose,
            "routing.ask_usage": routing.ask_usage,
            "routing.require_model": routing.require_model,
            "routing.hold": routing.room,
            "routing.session_hints": routing.session_hints,
            "routing.ignore": routing.ignored,
            "limits.max_body_bytes": limits.max_body_bytes,
            "limits.max_event_bytes": limits.max_event_bytes,
            "limits.max_body_memory_bytes": limits.max_body_memory_bytes,
            "limits.max_in_flight": limits.max_in_flight,
            "limits.max_connections": limits.max_connections,
            "limits.drain_seconds": limits.drain_timeout,
            "limits.drain_delay_seconds": limits.drain_delay,
            "limits.*_ms": timeouts,
        );
        let mut changed: Vec<&'static str> = changed;
        if old.models != new.models && !changed.contains(&"model") {
            changed.push("model");
        }
        let mut needs_restart = only_at_the_start(old, new);
        // Without a file each reading draws another key.
        let name = |config: &Config| Chain::new(config.routing.hash_key, b"").hash(b"");
        if old.routing.hash_key_file == new.routing.hash_key_file
            && new.routing.hash_key_file.is_some()
            && name(old) != name(new)
        {
            needs_restart.push("routing.hash_key_file");
        }
        match (&old.tls, &new.tls) {
            (None, Some(_)) | (Some(_), None) => needs_restart.push("tls"),
            (old, new) if old != new => changed.push("tls"),
            _ => {}
        }
        Self { changed, needs_restart }
    }

    /// Puts the old values back where the process goes on with them.
    pub(super) fn keep_what_needs_a_restart(&self, old: &Config, new: &mut Config) {
        if self.needs_restart.contains(&"tls") {
            new.tls.clone_from(&old.tls);
        }
        // Drawn where no file has it.
        new.routing.hash_key = old.routing.hash_key;
        keep_from_the_start(old, new);
        new.tenant_rules.budgets = old.tenant_rules.budgets;
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |keys: &[&str]| if keys.is_empty() { "nothing".to_owned() } else { keys.join(", ") };
        write!(f, "changed: {}", list(&self.changed))?;
        if !self.needs_restart.is_empty() {
            write!(f, "; only a restart changes: {}", list(&self.needs_restart))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::File;

    fn config(text: &str) -> Config {
        Config::try_from(File::parse(text).unwrap()).unwrap()
    }

    #[test]
    fn what_differs_is_named_by_its_key_and_what_cannot_change_is_kept() {
        let old = config("worker = [\"http://a:1\"]");
        assert_eq!(
            Changes::between(&old, &config("worker = [\"http://a:1\"]")).to_string(),
            "changed: nothing"
        );
        let mut new = config(
            "worker = [\"http://b:1\"]\nlisten = \"127.0.0.1:9\"\npolicy = \"random\"\n\
             [limits]\nbody_idle_ms = 7\n[routing]\nindex_bytes = 4096\n[scale]\nmax = 3",
        );
        let changes = Changes::between(&old, &new);
        assert_eq!(changes.changed, ["worker", "policy", "limits.*_ms"]);
        assert_eq!(changes.needs_restart, ["listen", "routing.index_bytes", "scale"]);
        changes.keep_what_needs_a_restart(&old, &mut new);
        assert!(Changes::between(&old, &new).needs_restart.is_empty());
        assert!(changes.to_string().ends_with("only a restart changes: listen, routing.index_bytes, scale"));
    }

    #[test]
    fn what_is_named_as_needing_a_restart_is_kept_for_one() {
        let old = config("");
        for (text, key) in [
            ("[limits]\nmax_cores = 3", "limits.max_cores"),
            ("[stored_state]\nmemory_bytes = 0", "stored_state"),
            ("[routing]\nfind_kv_events = false", "routing.find_kv_events"),
            ("[resume]\nmemory_bytes = 0", "resume"),
            ("[routing]\nslow_start_ms = 1", "routing.slow_start_ms"),
        ] {
            let mut new = config(text);
            let changes = Changes::between(&old, &new);
            assert_eq!(changes.needs_restart, [key]);
            changes.keep_what_needs_a_restart(&old, &mut new);
            // Else it would be in force for who asks, and the next reload would not name it.
            assert!(Changes::between(&old, &new).needs_restart.is_empty(), "{key}");
        }
    }
}
