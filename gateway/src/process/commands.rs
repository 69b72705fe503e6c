//! What the binary does besides serving: prints what it would serve by, its schema, a new key.

use std::io::{self, Write};

use clap::CommandFactory;
use schemars::schema_for;

use super::args::{Cli, Command, ConfigCommand, ServeArgs};
use crate::{
    access::tenants::{hex, key_hash},
    config::File,
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

fn check(args: ServeArgs) -> Outcome {
    let file = args.merged()?;
    ServeArgs::validated(file.clone())?;
    let shown = file.shown()?;
    let hidden =
        if shown.contains(HIDDEN) { "# Users and passwords in URLs are left out (…).\n" } else { "" };
    print(format!("{VALID}\n{hidden}{shown}").as_bytes())
}
