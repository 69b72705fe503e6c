//! The routing core of the gateway, sans-IO: what a prompt's prefix is, which worker holds how much of it,
//! and where it should go. No sockets, no clock, no randomness: time and random bits are arguments, so that
//! the gateway and a simulator run the very same code.
//!
//! Read in this order:
//! 1. [`keyer`]: a prompt's canonical bytes become a chain of block hashes; [`media`]: what in it is no text.
//! 2. [`index`]: which worker holds which prefix, in a fixed number of bytes.
//! 3. [`load`]: what each worker has been sent and not yet finished; [`pace`]: how fast it gets through that.
//!    [`others`]: what others send there, [`told`]: what they have placed there.
//! 4. [`cost`]: the predicted price of sending a request to a worker.
//! 5. [`mod@pick`]: the choice, with its reason; [`policy`] lists what may be asked for; [`mod@route`] is one
//!    step of it all, as gateway and simulator take it, and [`mod@shortlist`] the same one among so many
//!    workers that a price for each takes too long.
//! 6. [`mod@legs`]: whether one worker computes a prompt and another answers; [`mod@transfers`]: what moving
//!    its KV takes; [`mod@peers`]: what a worker could fetch of a prompt from another.
//!
//! 7. [`waiting_room`]: who begins when, and who waits until a worker can begin.
//!
//! [`mod@capacity`] is what a cache that says nothing is believed to hold, [`rate`] how fast a worker is,
//! [`mod@fading`] what its cache was good for lately, [`slow_start`] how a cold one joins.
//!
//! Where an engine publishes its KV events, [`kv_feed`] makes the index exact, over the names of
//! [`token_chain`]. Beside them, [`health`] says whether a worker may be chosen at all, [`breaker`] whether
//! it answers well enough to be, [`refusals`] what it refuses and until when, [`own_faults`] whose requests
//! are refused for their own fault, and [`retry_budget`] how many requests may be sent again; [`rate_limit`]
//! is how much may come in a time, [`lease`] how much where several gateways count together, and [`slots`]
//! how much at once there. [`budget`] is how much may be used in a day or a month, and [`money`] what it
//! costs.

pub mod autoscale;
pub mod breaker;
pub mod budget;
pub mod capacity;
pub mod cost;
pub mod fading;
pub mod health;
pub mod index;
pub mod keyer;
pub mod kv_feed;
pub mod lease;
pub mod legs;
pub mod load;
pub mod media;
pub mod money;
pub mod others;
pub mod own_faults;
pub mod pace;
pub mod peers;
pub mod pick;
pub mod poison;
pub mod policy;
pub mod rate;
pub mod rate_limit;
pub mod refusals;
pub mod retry_budget;
pub mod route;
pub mod sessions;
pub mod shortlist;
pub mod slots;
pub mod slow_start;
pub mod token_chain;
pub mod told;
pub mod transfers;
pub mod ttft;
pub mod waiting_room;
pub mod working_sets;

mod balance;
mod candidate;
mod recent_use;
mod rendezvous;
mod spread_map;

pub use breaker::{Breaker, Verdict};
pub use budget::{Budget, BudgetMark};
pub use capacity::Capacity;
pub use cost::{Cost, CostModel};
pub use fading::FadingSum;
pub use health::{Health, State};
pub use index::{Lengths, Owner, Placement, PrefixIndex, WorkerId};
pub use keyer::{PrefixChain, TextKeyer};
pub use kv_feed::{Action, KvFeed, Recovery};
pub use lease::{Dry, Lease, LeaseAnswer, LeaseQuestion};
pub use legs::{Splitting, Ways};
pub use load::{Load, LoadSnapshot};
pub use media::Media;
pub use money::{Money, Price};
pub use others::{EngineLoad, OwnLoad};
pub use pace::{Pace, PaceSnapshot};
pub use pick::{Candidate, Pick, RequestView, Turn, pick};
pub use policy::{Policy, Reason, UnknownPolicy};
pub use rate::{PrefillRate, Rates};
pub use rate_limit::{RateLimit, Standing};
pub use retry_budget::RetryBudget;
pub use route::{PromptViews, consider, consider_peers, fill_matches, may_wait, quote, quote_one};
pub use shortlist::Shortlist;
pub use slots::{Slots, SlotsAnswer, SlotsQuestion};
pub use token_chain::TokenSpace;
pub use transfers::{Transfer, Transfers};
pub use waiting_room::{CandidateSet, Quote, RoomRules, WaitingRoom};
