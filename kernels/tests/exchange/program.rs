//! What steps of `peer.cuh` do, read from its lines. A line that is not known here is an error: what it means
//! for the exchange has to be thought about, and said here.

/// What ends a step, or tells of a fault, in the order of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    /// All that this block wrote reaches other ranks before what follows; of steps that send alone or of all.
    Fence { of_senders: bool },
    /// The block is counted; all but the last go no further.
    Count,
    /// What follows up to the end of the braces is left out if the group has failed.
    UnlessFailed,
    /// Each rank is told that the round's message is there.
    Flags,
    /// The blocks that are counted begin anew.
    Zero,
    /// The step's next round is the one after.
    Advance,
    /// Each rank is told of a fault's round.
    TellRound,
    /// Each rank is told whose fault it is.
    TellFault,
    /// What other ranks do not see.
    Nothing,
}

#[derive(Debug)]
pub(crate) struct Program {
    /// `Peer::end`.
    pub(crate) end: Vec<Op>,
    /// `Peer::accuse`.
    pub(crate) accuse: Vec<Op>,
    /// Whether a rank asks for whom the one that it misses waits itself.
    pub(crate) follows: bool,
}

/// How a rank that waited for too long accuses another; and how it would name the one that it misses itself.
const FOLLOWS: &str = "if (missing != 0) accuse(at_fault(lowest, phase, round), phase, round, DEADLINE);";
const NAMES_ITS_OWN: &str = "if (missing != 0) accuse(lowest, phase, round, DEADLINE);";

const TO_ALL: &str = "for (uint32_t to = 0; to < layout.ranks; ++to)";

/// What a line of `end` or `accuse` does.
fn known(line: &str) -> Option<Op> {
    if let Some(told) = line.strip_prefix(TO_ALL) {
        return match told.trim() {
            "store_relaxed(flag(to, phase, round, rank), round);" => Some(Op::Flags),
            "store_relaxed(control(to) + 1, round);" => Some(Op::TellRound),
            "store_relaxed(control(to), fault);" => Some(Op::TellFault),
            _ => None,
        };
    }
    Some(match line {
        "fence_system();" => Op::Fence { of_senders: false },
        "if (SENDS) fence_system();" => Op::Fence { of_senders: true },
        "if (atomic_add(&state->done[step], 1u) + 1 < blocks) return;" => Op::Count,
        "if (SENDS && !has_failed()) {" | "if (has_failed()) return;" => Op::UnlessFailed,
        "state->done[step] = 0;" => Op::Zero,
        "state->rounds[step] = following(round);" => Op::Advance,
        // The fence of one thread is the block's, since all have come to a barrier before.
        "sync_block();"
        | "if (threadIdx.x != 0) return;"
        | "const uint32_t round = state->rounds[step];"
        | "}"
        | "if (step == DISPATCH_RECEIVE) ends(TO_EXPERTS);"
        | "if (step == COMBINE_RECEIVE) ends(BACK);"
        | "#pragma unroll 1"
        | "const uint32_t fault = cause << CAUSE_BIT | phase << PHASE_BIT | whom;"
        | "state->fault_round = round;"
        | "state->fault = fault;" => Op::Nothing,
        _ => return None,
    })
}

/// Lines of functions whose effect is `group.rs`'s own: what a step may begin with, and how it waits.
const AS_THEY_ARE: [(&str, &[&str]); 5] = [
    (
        "uint32_t at_fault(uint32_t whom, Phase phase, uint32_t round) const",
        &[
            "#pragma unroll 1",
            "for (uint32_t before = 0; before < 2; ++before) {",
            "if (phase == DISPATCH) --round;",
            "phase = phase == DISPATCH ? COMBINE : DISPATCH;",
            "if (round == 0 || load_acquire(flag(rank, phase, round, rank)) != round) break;",
            "uint32_t from = 0;",
            "while (from < layout.ranks && load_acquire(flag(whom, phase, round, from)) == round) ++from;",
            "if (from == layout.ranks) break;",
            "whom = from;",
            "}",
            "return whom;",
        ],
    ),
    (
        "bool is_in_turn() const",
        &[
            "const uint32_t next = state->rounds[DISPATCH_SEND], unfinished = state->rounds[COMBINE_RECEIVE];",
            "return next == unfinished || next == following(unfinished);",
        ],
    ),
    (
        "bool has_failed() const",
        &[
            "const uint32_t* told = control(rank);",
            "const uint32_t fault = load_acquire(told);",
            "if (fault == 0) return false;",
            "state->fault_round = told[1];",
            "state->fault = fault;",
            "return true;",
        ],
    ),
    (
        "bool may_begin() const",
        &[
            "if (threadIdx.x == 0) shared_words()[STOPS] = has_failed();",
            "sync_block();",
            "return shared_words()[STOPS] == 0;",
        ],
    ),
    (
        "bool are_all_here(Phase phase, uint32_t round) const",
        &[
            "if (threadIdx.x < LANES) {",
            "bool here = true, told = false;",
            "if (threadIdx.x < layout.ranks) {",
            "const uint32_t* own = flag(rank, phase, round, threadIdx.x);",
            "const uint32_t* fault = control(rank);",
            "here = load_acquire(own) == round;",
            "const uint64_t start = here ? 0 : nanoseconds();",
            "while (!here && !told && nanoseconds() - start < uint64_t(deadline_us) * 1000) {",
            "here = load_acquire(own) == round;",
            "told = load_acquire(fault) != 0;",
            "}",
            "}",
            "const uint32_t missing = lanes_where(!here);",
            "if (threadIdx.x == 0) {",
            "const uint32_t lowest = count_bits((missing & -missing) - 1);",
            FOLLOWS,
            "shared_words()[STOPS] = missing != 0;",
            "}",
            "}",
            "sync_block();",
            "return shared_words()[STOPS] == 0;",
        ],
    ),
];

/// The lines of a function, without comments.
fn lines_of<'a>(source: &'a str, head: &str) -> Vec<&'a str> {
    let (_, rest) = source.split_once(head).unwrap_or_else(|| panic!("{head} is gone"));
    let mut depth = 1;
    let inside = |line: &&str| {
        depth += line.matches('{').count();
        depth -= line.matches('}').count();
        depth > 0
    };
    let lines = rest.lines().skip(1).map(str::trim).take_while(inside);
    lines.filter(|line| !line.is_empty() && !line.starts_with("//")).collect()
}

fn ops(source: &str, head: &str) -> Vec<Op> {
    let op =
        |line: &str| known(line).unwrap_or_else(|| panic!("`{head}` has a line that is not known: {line}"));
    lines_of(source, head).into_iter().map(op).filter(|op| *op != Op::Nothing).collect()
}

impl Program {
    pub(crate) fn read(source: &str) -> Self {
        let mut follows = true;
        for (head, lines) in AS_THEY_ARE {
            let mut found = lines_of(source, head);
            for line in found.iter_mut().filter(|line| **line == NAMES_ITS_OWN) {
                (*line, follows) = (FOLLOWS, false);
            }
            assert_eq!(found, lines, "`{head}` is another");
        }
        let head = "void accuse(uint32_t whom, Phase phase, uint32_t round, Cause cause) const";
        Self {
            end: ops(source, "void end(Step step, Phase phase, uint32_t blocks) const"),
            accuse: ops(source, head),
            follows,
        }
    }
}
