//! The Redis or Valkey by which several gateways keep limits together: a connection to it, and the one script
//! that it runs (`store/leases.lua`). Every step has a time in which it must be done. What is asked, and what
//! becomes of the answers, is the business of `access/tenants/shared.rs`.

use std::{io, time::Duration};

use keyway_core::{LeaseAnswer, LeaseQuestion, SlotsAnswer, SlotsQuestion};
use redis::{
    AsyncConnectionConfig, RedisConnectionInfo, RedisError, Script, ServerErrorKind,
    aio::MultiplexedConnection, cmd,
};
use tokio::task::JoinHandle;

use crate::{
    clock,
    config::StoreConfig,
    limits::{STORE_CONNECT_TIMEOUT, STORE_SILENCE_MAX, STORE_TIMEOUT},
    net::Connector,
};

/// What the store runs for each set of questions.
const LEASES: &str = include_str!("store/leases.lua");

/// A connection to the store.
#[derive(Debug)]
pub struct Link {
    connection: MultiplexedConnection,
    driver: JoinHandle<()>,
    script: Script,
    prefix: String,
    gateway: String,
}

/// A question about one limit.
#[derive(Debug, Clone, PartialEq)]
pub struct LimitQuestion {
    /// What the key of the limit ends with: the same in all gateways.
    pub key: String,
    /// Tells it from other questions of this gateway about the same limit; of a budget: whose use it says.
    pub number: u64,
    /// What is asked about it.
    pub about: About,
}

/// What is asked about a limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum About {
    /// How many requests may come in a time.
    Requests(LeaseQuestion, Rule),
    /// How many tokens may come in a time.
    Tokens(LeaseQuestion, Rule),
    /// How many requests may be in flight, of at most so many.
    Slots(SlotsQuestion, usize),
    /// What others have used of a budget.
    Budget(BudgetQuestion),
}

/// What a gateway says of a budget in a day or month, in tokens or nano-units of money.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BudgetQuestion {
    /// What was used here; 0 where that is not known yet.
    pub own: u64,
    /// How long the store is to know it.
    pub keep: Duration,
}

/// How much may come in a time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// What may come in a minute, in the limit's unit.
    pub per_minute: f64,
    /// What may come at once, in the same unit.
    pub burst: f64,
}

/// What the store says of one limit: two numbers, of which the question says what they are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LimitAnswer {
    given: f64,
    left: f64,
}

/// What the store says to one set of questions.
#[derive(Debug, Clone, PartialEq)]
pub struct Answers {
    /// Gateways that have said something of late.
    pub gateways: usize,
    /// Answers in the order of the questions.
    pub limits: Vec<LimitAnswer>,
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No connection, or no TLS.
    #[error("no connection: {0}")]
    Connect(#[from] io::Error),
    /// It did not answer in time.
    #[error("no answer within {} ms", .0.as_millis())]
    Late(Duration),
    /// It refused the user or password.
    #[error("it refuses the user or password of store.url: {0}")]
    Password(RedisError),
    /// It keeps keys on several servers, where one script cannot reach them all.
    #[error(
        "it is a cluster, which cannot keep limits: name one server that is no part of a cluster (cluster-enabled no), or a \
         proxy in front of one"
    )]
    Cluster,
    /// It takes no writes.
    #[error("it is a replica, which takes no writes: name the primary")]
    Replica,
    /// It does not say what it is.
    #[error("it is no Redis of version 6 or later, and no Valkey: {0}")]
    TooOld(RedisError),
    /// It said something else.
    #[error("{0}")]
    Other(RedisError),
    /// It answered in another shape than the script's.
    #[error("it answered {got} numbers to {asked} questions")]
    Nonsense {
        /// Questions in the set.
        asked: usize,
        /// Numbers in the answer.
        got: usize,
    },
}

impl LimitAnswer {
    /// Of a limit on what comes in a time.
    pub fn of_lease(self) -> LeaseAnswer {
        LeaseAnswer { granted: self.given, left: self.left }
    }

    /// Of a budget: what others have used.
    pub fn of_budget(self) -> u64 {
        self.given as u64
    }

    /// Of a limit on what is in flight.
    pub fn of_slots(self) -> SlotsAnswer {
        SlotsAnswer { held: self.given as usize, free: self.left as usize }
    }
}

impl Link {
    /// Connects, shows who `gateway` is, and looks whether the server can keep limits.
    pub async fn connect(config: &StoreConfig, gateway: &str) -> Result<Self, StoreError> {
        let step = Self::connect_without_deadline(config, gateway);
        clock::timeout(STORE_CONNECT_TIMEOUT, step)
            .await
            .map_err(|_| StoreError::Late(STORE_CONNECT_TIMEOUT))?
    }

    async fn connect_without_deadline(config: &StoreConfig, gateway: &str) -> Result<Self, StoreError> {
        let connector = Connector::new(STORE_CONNECT_TIMEOUT);
        let opened = connector.connect(&config.host, config.port, config.security.as_ref(), false).await?;
        let mut info = RedisConnectionInfo::default().set_db(config.database);
        if let Some(user) = &config.user {
            info = info.set_username(user);
        }
        if let Some(password) = &config.password {
            info = info.set_password(&password.0);
        }
        let made = MultiplexedConnection::new_with_config(&info, opened.stream, AsyncConnectionConfig::new());
        let (connection, driver) = made.await.map_err(StoreError::of)?;
        let mut link = Self {
            connection,
            driver: tokio::spawn(driver),
            script: Script::new(LEASES),
            prefix: config.prefix.clone(),
            gateway: gateway.to_owned(),
        };
        link.look().await?;
        Ok(link)
    }

    /// Whether the server can keep limits.
    async fn look(&mut self) -> Result<(), StoreError> {
        let said: Vec<redis::Value> =
            cmd("HELLO").query_async(&mut self.connection).await.map_err(|error| {
                match StoreError::of(error) {
                    StoreError::Other(error) => StoreError::TooOld(error),
                    other => other,
                }
            })?;
        let text = |value: &redis::Value| redis::from_redis_value_ref::<String>(value).ok();
        let named = |name: &str| {
            let at = said.iter().position(|value| text(value).is_some_and(|text| text == name));
            at.and_then(|at| said.get(at + 1)).and_then(text)
        };
        match (named("mode").as_deref(), named("role").as_deref()) {
            (Some("cluster"), _) => Err(StoreError::Cluster),
            (_, Some("replica" | "slave")) => Err(StoreError::Replica),
            _ => Ok(()),
        }
    }

    /// Whether limits can be kept there: connects, and has the script read. Leaves nothing behind but that.
    pub async fn try_out(config: &StoreConfig) -> Result<(), StoreError> {
        let mut link = Self::connect(config, "").await?;
        let read = clock::timeout(STORE_TIMEOUT, link.script.load_async(&mut link.connection)).await;
        read.map_err(|_| StoreError::Late(STORE_TIMEOUT))?.map(drop).map_err(StoreError::of)
    }

    /// Asks one set of questions; without any it is a sign of life.
    pub async fn ask(&mut self, questions: &[LimitQuestion]) -> Result<Answers, StoreError> {
        let mut call = self.script.prepare_invoke();
        call.key(format!("{}:gateways", self.prefix));
        call.key(format!("{}:gateway:{}", self.prefix, self.gateway));
        call.arg(&self.gateway).arg(STORE_SILENCE_MAX.as_millis() as u64);
        for question in questions {
            call.key(format!("{}:{}", self.prefix, question.key));
            let (kind, whose, numbers) = question.said();
            call.arg(kind).arg(whose);
            for number in numbers {
                call.arg(number);
            }
        }
        let answer = call.invoke_async::<Vec<f64>>(&mut self.connection);
        let answer = clock::timeout(STORE_TIMEOUT, answer).await;
        let numbers = answer.map_err(|_| StoreError::Late(STORE_TIMEOUT))?.map_err(StoreError::of)?;
        let wrong = StoreError::Nonsense { asked: questions.len(), got: numbers.len() };
        let Some((gateways, limits)) = numbers.split_first() else { return Err(wrong) };
        if limits.len() != 2 * questions.len() || !numbers.iter().all(|number| number.is_finite()) {
            return Err(wrong);
        }
        let limits = limits.chunks_exact(2).map(|pair| LimitAnswer { given: pair[0], left: pair[1] });
        Ok(Answers { gateways: (*gateways as usize).max(1), limits: limits.collect() })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl LimitQuestion {
    /// The nine arguments of the script.
    fn said(&self) -> (&'static str, String, [f64; 7]) {
        let rate = |asked: LeaseQuestion, rule: Rule| {
            let per_ms = rule.per_minute / 60_000.0;
            [asked.used, asked.granted, asked.need, asked.ahead, per_ms, rule.burst, asked.if_new]
        };
        match self.about {
            About::Requests(asked, rule) => ("rate", format!("requests {}", self.number), rate(asked, rule)),
            About::Tokens(asked, rule) => ("rate", format!("tokens {}", self.number), rate(asked, rule)),
            About::Slots(SlotsQuestion { kept, need, ahead }, most) => {
                let numbers = [kept, 0, need, ahead, most, 0, 0].map(|number| number as f64);
                ("slots", self.number.to_string(), numbers)
            }
            About::Budget(BudgetQuestion { own, keep }) => {
                let numbers = [own as f64, keep.as_millis() as f64, 0.0, 0.0, 0.0, 0.0, 0.0];
                ("budget", format!("{:016x}", self.number), numbers)
            }
        }
    }
}

impl StoreError {
    fn of(error: RedisError) -> Self {
        match error.kind() {
            redis::ErrorKind::AuthenticationFailed => Self::Password(error),
            redis::ErrorKind::Server(ServerErrorKind::ReadOnly) => Self::Replica,
            _ if matches!(error.code(), Some("NOAUTH" | "WRONGPASS")) => Self::Password(error),
            _ if matches!(error.code(), Some("MOVED" | "CROSSSLOT" | "CLUSTERDOWN")) => Self::Cluster,
            _ => Self::Other(error),
        }
    }
}
