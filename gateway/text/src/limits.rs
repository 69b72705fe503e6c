//! Bounds on what one text may cost. Templates come with checkpoints, and conversations from clients, so
//! neither may take a worker's thread or memory for itself.

/// Tags, brackets and operators inside each other in a template. Real templates nest below 20; each level
/// costs the parser well under 4 KiB of a 2 MiB stack.
pub(crate) const TEMPLATE_DEPTH_MAX: usize = 120;

/// Statements, expressions and macro calls inside each other while rendering. A macro that describes a JSON
/// schema takes about 10 for each level of the schema; each costs about 1 KiB of a 2 MiB stack.
pub(crate) const RENDER_DEPTH_MAX: usize = 500;

/// Statements and expressions evaluated in one rendering: a few seconds. A conversation of 10,000 messages
/// takes about a million.
pub(crate) const RENDER_STEPS_MAX: u64 = 200_000_000;

/// Bytes of a text, or of a list's items, that take as long to go through as one step: all steps are then
/// some ten gigabytes.
pub(crate) const RENDER_BYTES_PER_STEP: u64 = 64;

/// Parts that one text is split into, characters among them: some 64 MB of values.
pub(crate) const RENDER_PARTS_MAX: usize = 1 << 20;

/// Bytes of a rendered prompt, and of any text made on the way: four times the largest request body.
/// Callers may ask for less.
pub(crate) const RENDER_BYTES_MAX: usize = 256 << 20;

/// Numbers in one `range`, as in Jinja2's sandbox.
pub(crate) const RANGE_MAX: i128 = 100_000;
