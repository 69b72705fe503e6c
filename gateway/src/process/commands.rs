//! What the binary does besides serving: prints what it would serve by, its schema, a new key.

use std::{
    io::{self, Write},
    time::Duration,
};

use clap::CommandFactory;
use futures_util::future::join_all;
use schemars::schema_for;
use tokio::runtime::Builder;

use super::args::{CheckArgs, Cli, Command, ConfigCommand, ServeArgs};
use crate::{
    access::tenants::{hex, key_hash},
    clock::Clock,
    config::{Config, File},
    fleet::{Fleet, ejection::Ejections},
    machine::descriptors::Shortages,
    metrics::Metrics,
    net::Connector,
    store::Link,
    upstream::Upstream,
    watch::probe,
};

/// What stands above what `config check` prints.
const VALID: &str = "# The configuration is valid. What is not named here has its default; deploy/keyway.toml lists all keys.";
/// How a URL looks whose user and password are left out.
const HIDDEN: &str = "://…@";

/// What goes wrong, in one line.
type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Does what the command line says.
pub fn run(command: Command) -> Outcome {
    match command {
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "keyway", &mut script);
            print(&script)
        }
        Command::NewKey { name } => new_key(name.as_deref()),
        Command::Config { command: ConfigCommand::Schema } => {
            print(format!("{}\n", serde_json::to_string_pretty(&schema_for!(File))?).as_bytes())
        }
        Command::Config { command: ConfigCommand::Check(args) } => check(*args),
    }
}

/// Writes to stdout. That its reader has gone (`keyway config check | head`) is no error.
fn print(text: &[u8]) -> Outcome {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Without a name, all for a person to read. With one, its table goes to stdout, so that it can be appended
/// to the file of tenants; the key, which must not stand there, to stderr.
fn new_key(name: Option<&str>) -> Outcome {
    let mut bits = [0; 32];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bits)
        .map_err(|_| "the system gives no random bits")?;
    let key = format!("kw-{}", hex(&bits));
    let hash = hex(&key_hash(key.as_bytes()));
    let Some(name) = name else {
        return print(
            format!(
                "key         {key}\nkey_sha256  {hash}\n\nThe key is for the tenant alone and kept nowhere. In the file of \
                 tenants:\n\n    [[tenant]]\n    name = \"NAME\"\n    key_sha256 = [\"{hash}\"]\n"
            )
            .as_bytes(),
        );
    };
    let name = toml::Value::from(name);
    print(format!("[[tenant]]\nname = {name}\nkey_sha256 = [\"{hash}\"]\n").as_bytes())?;
    eprintln!("\nThe key, for that tenant alone; it is kept nowhere: {key}");
    Ok(())
}

fn check(CheckArgs { probe, serve }: CheckArgs) -> Outcome {
    let file = serve.merged()?;
    let config = ServeArgs::validated(file.clone())?;
    let shown = file.shown()?;
    let hidden =
        if shown.contains(HIDDEN) { "# Users and passwords in URLs are left out (…).\n" } else { "" };
    print(format!("{VALID}\n{hidden}{shown}").as_bytes())?;
    if probe { asked(&config) } else { Ok(()) }
}

/// Asks each listed worker once, and says on stderr what it found; an error where one cannot be used.
fn asked(config: &Config) -> Outcome {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let metrics = Metrics::new()?;
    let shortages = Shortages::new(metrics.lifecycle.shortages.clone());
    let upstream = Upstream::new(Connector::new(config.timeouts.connect), shortages);
    let found = runtime.block_on(async {
        let fleet = Fleet::new(&config.workers, Duration::ZERO, &Ejections::new(Clock::start(), None));
        // In the order in which they are listed, which is not the fleet's.
        let all = fleet.all();
        let named = |name: String| all.iter().find(|worker| worker.name == name).cloned();
        let workers: Vec<_> = config.workers.iter().filter_map(|listed| named(listed.name())).collect();
        let asked = workers.iter().map(|worker| probe::once(worker, &upstream, &metrics));
        let found = join_all(asked).await;
        workers.into_iter().zip(found).collect::<Vec<_>>()
    });
    let mut unusable = 0;
    for (worker, found) in &found {
        if let Err(fault) = found {
            unusable += 1;
            eprintln!("{}: {fault} ({})", worker.name, fault.url);
        } else {
            let models: Vec<String> = worker.models().into_iter().map(|model| model.id).collect();
            eprintln!("{}: serves {}", worker.name, models.join(", "));
        }
    }
    let store = config.store.as_ref().map(|store| (store.place(), runtime.block_on(Link::try_out(store))));
    if let Some((place, tried)) = &store {
        match tried {
            Ok(()) => eprintln!("store {place}: can keep limits"),
            Err(error) => eprintln!("store {place}: {error}"),
        }
    }
    if found.is_empty() {
        eprintln!("no worker is listed; those of discovery are not asked");
    }
    match store {
        _ if unusable > 0 => Err(format!("{unusable} of {} workers cannot be used", found.len()).into()),
        Some((_, Err(_))) => Err("the store cannot be used".into()),
        _ => Ok(()),
    }
}
