//! `keyway`: parses the command line, then serves or looks at the configuration. No logic of its own.

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use keyway::{
    access::tenants::{hex, key_hash},
    config::{Config, File},
    machine::{
        cores::{self, Cores},
        descriptors, heap, log, panics,
    },
    process::{
        args::{Cli, Command, ConfigCommand, ServeArgs},
        run,
        signals::Signals,
    },
};

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Completions { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "keyway", &mut std::io::stdout());
            Ok(())
        }
        Some(Command::NewKey) => new_key(),
        Some(Command::Config { command: ConfigCommand::Schema }) => schema(),
        Some(Command::Config { command: ConfigCommand::Check(args) }) => {
            args.resolve().map(|c| check(&c)).map_err(Into::into)
        }
        None => serve(&cli.serve),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("keyway: {}", error.to_string().trim_end());
            ExitCode::FAILURE
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn schema() -> Outcome {
    println!("{}", serde_json::to_string_pretty(&schemars::schema_for!(File))?);
    Ok(())
}

fn new_key() -> Outcome {
    let mut bits = [0; 32];
    rustls::crypto::ring::default_provider()
        .secure_random
        .fill(&mut bits)
        .map_err(|_| "the system gives no random bits")?;
    let key = format!("kw-{}", hex(&bits));
    println!("key         {key}\nkey_sha256  {}", hex(&key_hash(key.as_bytes())));
    Ok(())
}

fn check(config: &Config) {
    println!("The configuration is valid.\n{config:#?}");
}

fn serve(args: &ServeArgs) -> Outcome {
    let config = args.clone().resolve()?;
    let again = args.clone();
    let reader = Box::new(move || again.clone().resolve());
    heap::keep_warm();
    // Until the end: the last lines are written then.
    let _log = log::to_stderr(config.log_format);
    panics::watch();
    descriptors::raise();
    // On one core there is nobody to hand a task to, and handing them over is what the other kind prepares
    // for.
    let (mut runtime, cores) = match cores::count().min(config.max_cores) {
        1 => (tokio::runtime::Builder::new_current_thread(), None),
        count => (tokio::runtime::Builder::new_multi_thread(), Some(Cores::start(count)?)),
    };
    let runtime = runtime.enable_all().build()?;
    runtime.block_on(async { run::run(config, reader, Signals::listen()?, cores).await })?;
    // Streams that outlived the drain time are cut here.
    runtime.shutdown_background();
    Ok(())
}
