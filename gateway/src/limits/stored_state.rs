//! Bounds of what is remembered of the things that workers store, and of the search for them.

use std::time::Duration;

/// Memory for the ids of what workers store: 340,000 of them.
pub const STORED_IDS_BYTES: usize = 32 << 20;

/// What one of them takes in all.
pub const STORED_ID_BYTES: usize = 96;

/// How long one is remembered: as long as OpenAI keeps a response.
pub const STORED_KEEP: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Longest id: OpenAI's and engines' have 30 to 70 bytes.
pub const MAX_STORED_ID_BYTES: usize = 256;

/// Ids of one request, in its path and in its body, that are looked at: the API has requests with three.
pub const STORED_REFERENCES_MAX: usize = 8;

/// Requests at once for whose ids the workers are asked; others wait. After a restart each conversation's
/// next turn is one.
pub const STORED_SEARCHES_MAX: usize = 32;

/// Ids in one line to another gateway, some 50 bytes each: 20,000 a second by lines 50 ms apart.
pub const STORED_NEWS_MAX: usize = 1_000;

/// How long an id that a tenant names and this gateway does not know may be on its way from another one: some
/// of its lines.
pub const STORED_NEWS_PATIENCE: Duration = Duration::from_millis(200);

/// What one worker may list: 4,000 files at 500 bytes each.
pub const MAX_LIST_BYTES: usize = 2 << 20;

/// Items of a list that is made of several workers' lists: OpenAI's own is 10,000 for files.
pub const LIST_ITEMS_MAX: usize = 10_000;

/// Workers that are asked at once whether they have something: as many connections.
pub const STORED_ASKED_AT_ONCE: usize = 32;
