//! The codec against bytes that Python's msgspec wrote from the engines' own structures, against itself, and
//! against bytes that mean harm.

use proptest::prelude::*;

use super::decode::BYTES_PER_BYTE;
use super::msgpack::Writer;
use super::*;

fn unhex(hex: &str) -> Vec<u8> {
    let digits: String = hex.split_whitespace().collect();
    (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
}

fn decode(hex: &str) -> EventBatch {
    let decoded = EventBatch::decode(&unhex(hex)).unwrap();
    assert_eq!((decoded.malformed, decoded.unknown, decoded.first_error), (0, 0, None));
    decoded.batch
}

fn int(bits: i64) -> EngineHash {
    EngineHash::Int(bits as u64)
}

#[expect(clippy::unnecessary_wraps, reason = "the fields are options")]
fn some(text: &str) -> Option<String> {
    Some(text.to_owned())
}

/// Two tokens a block.
fn stored(hashes: &[i64], parent: Option<i64>, token_ids: &[u32]) -> BlockStored {
    BlockStored {
        block_hashes: hashes.iter().map(|bits| int(*bits)).collect(),
        parent_block_hash: parent.map(int),
        token_ids: token_ids.to_vec(),
        block_size: 2,
        ..BlockStored::default()
    }
}

fn removed(hash: i64, medium: Option<&str>, group_idx: Option<u32>) -> KvEvent {
    let block_hashes = vec![int(hash)];
    KvEvent::BlockRemoved(BlockRemoved {
        block_hashes,
        medium: medium.map(str::to_owned),
        group_idx,
        ..BlockRemoved::default()
    })
}

/// As captured from vLLM v0.26.0 (volcano-sh/kthena issue 1535), with other numbers.
const VLLM_V26: &str = "93cb41da862940200000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf9e
    adf059cae06cedb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473dc00106465666768696a6b6c6d6e6f70717273aa62
    6c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f
    75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e00";

#[test]
fn vllm_v0_26_as_captured() {
    let expected = EventBatch {
        ts: 1_780_000_000.5,
        events: vec![KvEvent::BlockStored(BlockStored {
            block_hashes: vec![EngineHash::Int(11_434_059_297_410_018_541)], // more than an i64 holds
            token_ids: (100..116).collect(),
            block_size: 16,
            medium: some("GPU"),
            extra_keys: vec![Vec::new()],
            group_idx: Some(0),
            kv_cache_spec_kind: some("full_attention"),
            ..BlockStored::default()
        })],
        data_parallel_rank: Some(0),
    };
    assert_eq!(decode(VLLM_V26), expected);
    assert_eq!(expected.encode(WireFormat::VllmMap), unhex(VLLM_V26));
}

#[test]
fn vllm_maps_with_everything() {
    let hex = "93cb3ff0000000000000938ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920102b17061
        72656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d6564
        69756da3475055a96c6f72615f6e616d65a761646170746572aa65787472615f6b6579739293a76164617074657292a3696d6703a473616c
        7491a761646170746572a967726f75705f69647801b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc
        6b765f63616368655f737065635f736c6964696e675f77696e646f77cc8084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f
        6861736865739101a66d656469756da3475055a967726f75705f6964780181a474797065b0416c6c426c6f636b73436c656172656403";
    let adapter = || ExtraKey::Text("adapter".to_owned());
    let image = ExtraKey::Raw(unhex("92a3696d6703").into());
    let expected = EventBatch {
        ts: 1.0,
        events: vec![
            KvEvent::BlockStored(BlockStored {
                medium: some("GPU"),
                lora_name: some("adapter"),
                extra_keys: vec![vec![adapter(), image, ExtraKey::Text("salt".to_owned())], vec![adapter()]],
                group_idx: Some(1),
                kv_cache_spec_kind: some("sliding_window"),
                kv_cache_spec_sliding_window: Some(128),
                ..stored(&[1, 2], None, &[1, 2, 3, 4])
            }),
            removed(1, Some("GPU"), Some(1)),
            KvEvent::AllBlocksCleared,
        ],
        data_parallel_rank: Some(3),
    };
    assert_eq!(decode(hex), expected);
    assert_eq!(expected.encode(WireFormat::VllmMap), unhex(hex));
}

#[test]
fn vllm_v0_23_arrays_and_whole_digests() {
    let hex = "93cb3ff0000000000000959cab426c6f636b53746f726564920102cfffffffffffffffff940102030402c0a3475055c0
        9291a473616c74c000ae66756c6c5f617474656e74696f6ec09cab426c6f636b53746f72656491c420000102030405060708090a0b0c0d0e
        0f101112131415161718191a1b1c1d1e1fc092070802c0c0c0c0c0c0c094ac426c6f636b52656d6f7665649101a34750550094ac426c6f63
        6b52656d6f7665649102a3435055c091b0416c6c426c6f636b73436c656172656400";
    let digest: Vec<u8> = (0..32).collect();
    let expected = EventBatch {
        ts: 1.0,
        events: vec![
            KvEvent::BlockStored(BlockStored {
                medium: some("GPU"),
                extra_keys: vec![vec![ExtraKey::Text("salt".to_owned())], Vec::new()],
                group_idx: Some(0),
                kv_cache_spec_kind: some("full_attention"),
                ..stored(&[1, 2], Some(-1), &[1, 2, 3, 4])
            }),
            KvEvent::BlockStored(BlockStored {
                block_hashes: vec![EngineHash::Bytes(digest.into())],
                ..stored(&[], None, &[7, 8])
            }),
            removed(1, Some("GPU"), Some(0)),
            removed(2, Some("CPU"), None),
            KvEvent::AllBlocksCleared,
        ],
        data_parallel_rank: Some(0),
    };
    assert_eq!(decode(hex), expected);
    assert_eq!(expected.encode(WireFormat::VllmArray), unhex(hex));
}

#[test]
fn a_map_around_the_batch() {
    let hex = "82a27473cb3ff0000000000000a66576656e74739183a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368
        65739101a66d656469756da3475055";
    assert_eq!(decode(hex).events, [removed(1, Some("GPU"), None)]);
}

#[test]
fn sglang_of_early_2025() {
    let hex =
        "92cb3ff00000000000009296ab426c6f636b53746f72656491fbfa92010202c092ac426c6f636b52656d6f76656491fb";
    let first = KvEvent::BlockStored(stored(&[-5], Some(-6), &[1, 2]));
    assert_eq!(decode(hex).events, [first, removed(-5, None, None)]);
}

#[test]
fn the_seventh_value_is_read_by_its_type() {
    // Salt and session; a list of components; and pairs of neighbours.
    let hex = "93cb3ff00000000000009398ab426c6f636b53746f72656491fbc092010202c0a347505582aa63616368655f73616c74a173
        aa73657373696f6e5f6964a17898ab426c6f636b53746f72656491fbc092010202c0a94350555f544945523191a466756c6c98ab426c6f63
        6b53746f7265649109c09292010292020302c0c0c001";
    let events = decode(hex).events;
    let salted = BlockStored {
        medium: some("GPU"),
        cache_salt: some("s"),
        session_id: some("x"),
        ..stored(&[-5], None, &[1, 2])
    };
    let tier = BlockStored { medium: some("CPU_TIER1"), ..stored(&[-5], None, &[1, 2]) };
    assert!(salted.is_primary() && !tier.is_primary());
    let pairs = BlockStored { bigram_tail: Some(3), ..stored(&[9], None, &[1, 2]) };
    assert_eq!(events, [salted, tier, pairs].map(KvEvent::BlockStored));
}

#[test]
fn sglang_maps() {
    let hex = "93cb3ff00000000000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391fbb170617265
        6e745f626c6f636b5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3
        475055aa63616368655f73616c74a17383a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391fba66d65646975
        6da347505501";
    let salted = BlockStored { medium: some("GPU"), cache_salt: some("s"), ..stored(&[-5], None, &[1, 2]) };
    let events = vec![KvEvent::BlockStored(salted), removed(-5, Some("GPU"), None)];
    let expected = EventBatch { ts: 1.0, events, data_parallel_rank: Some(1) };
    assert_eq!(decode(hex), expected);
    assert_eq!(expected.encode(WireFormat::SglangMap), unhex(hex));
}

/// A batch around what `events` writes.
fn batch_of(len: usize, events: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut writer = Writer::default();
    writer.array(3);
    writer.float(1.0);
    writer.array(len);
    events(&mut writer);
    writer.nil();
    writer.out
}

#[test]
fn an_event_that_makes_no_sense_does_not_take_its_batch_along() {
    let payload = batch_of(5, |w| {
        w.array(2);
        w.text("BlockRemoved");
        w.text("no list of hashes");
        w.array(1);
        w.text("BlockInactive");
        w.uint(17);
        w.map(1); // no type
        w.text("block_hashes");
        w.array(0);
        w.array(2);
        w.text("BlockRemoved");
        w.array(1);
        w.uint(8);
    });
    let decoded = EventBatch::decode(&payload).unwrap();
    assert_eq!(decoded.batch.events, [removed(8, None, None)]);
    assert_eq!((decoded.malformed, decoded.unknown), (3, 1));
    assert!(decoded.first_error.unwrap().to_string().contains("block_hashes"));
}

#[test]
fn lists_of_another_type_are_left_as_they_came() {
    let payload = batch_of(2, |w| {
        w.map(2);
        w.text("block_hashes");
        w.text("of a type that is not known");
        w.text("type");
        w.text("BlockInactive");
        w.map(4);
        w.text("token_ids");
        w.nil();
        w.text("block_hashes");
        w.array(1);
        w.uint(8);
        w.text("block_size");
        w.uint(2);
        w.text("type");
        w.text("BlockStored");
    });
    let decoded = EventBatch::decode(&payload).unwrap();
    assert_eq!((decoded.malformed, decoded.unknown), (0, 1));
    assert_eq!(decoded.batch.events, [KvEvent::BlockStored(stored(&[8], None, &[]))]);
}

#[test]
fn arrays_may_end_early_and_have_more_than_is_known() {
    let expected = [KvEvent::BlockStored(stored(&[1], None, &[5, 6]))];
    for len in 5..15 {
        let payload = batch_of(1, |w| {
            w.array(len);
            w.text("BlockStored");
            w.array(1);
            w.uint(1);
            w.nil();
            w.array(2);
            w.uint(5);
            w.uint(6);
            w.uint(2);
            (5..len).for_each(|_| w.nil());
        });
        assert_eq!(EventBatch::decode(&payload).unwrap().batch.events, expected, "{len} values");
    }
}

#[test]
fn lengths_that_lie_and_bottomless_nesting_are_errors() {
    let liar = [0x93, 0xca, 0, 0, 0, 0, 0xdd, 0xff, 0xff, 0xff, 0xff];
    assert!(EventBatch::decode(&liar).is_err());
    assert!(EventBatch::decode(&vec![0x91; 1 << 20]).is_err());
    assert!(EventBatch::decode(&[]).is_err());
    // Deep, and whole: an unknown event.
    let payload = batch_of(1, |w| {
        (0..1 << 20).for_each(|_| w.array(1));
        w.nil();
    });
    assert_eq!(EventBatch::decode(&payload).unwrap().malformed, 1);
}

#[test]
fn pairs_that_are_no_chain_are_refused() {
    let payload = batch_of(1, |w| {
        w.array(4);
        w.text("BlockStored");
        w.array(1);
        w.uint(1);
        w.nil();
        w.array(2);
        for pair in [[1, 2], [3, 4]] {
            w.array(2);
            for id in pair {
                w.uint(id);
            }
        }
    });
    assert_eq!(EventBatch::decode(&payload).unwrap().malformed, 1);
}

// === Properties ===

/// Writes one value.
type Write = Box<dyn Fn(&mut Writer)>;

fn hash() -> impl Strategy<Value = EngineHash> {
    let digest = prop::collection::vec(any::<u8>(), 0..40);
    prop_oneof![
        any::<u64>().prop_map(EngineHash::Int),
        digest.prop_map(|bytes| EngineHash::Bytes(bytes.into_boxed_slice())),
    ]
}

fn name() -> impl Strategy<Value = Option<String>> {
    prop::option::of("[a-zé]{0,40}")
}

fn extra_key() -> impl Strategy<Value = ExtraKey> {
    prop_oneof![
        "[a-z]{0,9}".prop_map(ExtraKey::Text),
        any::<i32>().prop_map(|value| {
            let mut writer = Writer::default();
            writer.int(i64::from(value));
            ExtraKey::Raw(writer.out.into())
        }),
    ]
}

prop_compose! {
    fn any_stored()(
        block_hashes in prop::collection::vec(hash(), 1..5),
        parent_block_hash in prop::option::of(hash()),
        token_ids in prop::collection::vec(any::<u32>(), 1..40),
        (bigram_tail, block_size, lora_id) in
            (prop::option::of(any::<u32>()), any::<u32>(), prop::option::of(any::<i64>())),
        (medium, lora_name, kind, salt, session, locality) in
            (name(), name(), name(), name(), name(), name()),
        extra_keys in prop::collection::vec(prop::collection::vec(extra_key(), 0..4), 0..4),
        (group_idx, window) in (prop::option::of(any::<u32>()), prop::option::of(any::<u32>())),
    ) -> BlockStored {
        BlockStored {
            block_hashes, parent_block_hash, token_ids, bigram_tail, block_size, lora_id, medium, lora_name,
            extra_keys, group_idx, locality,
            kv_cache_spec_kind: kind,
            kv_cache_spec_sliding_window: window,
            cache_salt: salt,
            session_id: session,
        }
    }
}

prop_compose! {
    fn any_removed()(
        hashes in prop::collection::vec((hash(), any::<u32>()), 1..5),
        (medium, locality) in (name(), name()),
        group_idx in prop::option::of(any::<u32>()),
        counted in any::<bool>(),
    ) -> BlockRemoved {
        let (block_hashes, counts) = hashes.into_iter().unzip();
        let remaining_copy_counts = Some(counts).filter(|_| counted);
        BlockRemoved { block_hashes, medium, group_idx, locality, remaining_copy_counts }
    }
}

prop_compose! {
    fn batch()(
        ts in -1e12..1e12,
        events in prop::collection::vec(
            prop_oneof![
                any_stored().prop_map(KvEvent::BlockStored),
                any_removed().prop_map(KvEvent::BlockRemoved),
                Just(KvEvent::AllBlocksCleared),
            ],
            0..5,
        ),
        data_parallel_rank in prop::option::of(any::<u32>()),
    ) -> EventBatch {
        EventBatch { ts, events, data_parallel_rank }
    }
}

/// What `format` has no place for.
fn without_the_unsayable(mut batch: EventBatch, format: WireFormat) -> EventBatch {
    for event in &mut batch.events {
        match event {
            KvEvent::BlockStored(stored) => match format {
                WireFormat::VllmMap => stored.cache_salt = None,
                WireFormat::VllmArray => {
                    (stored.cache_salt, stored.session_id, stored.locality) = (None, None, None);
                }
                WireFormat::SglangMap | WireFormat::SglangArray => {
                    (stored.lora_name, stored.locality) = (None, None);
                    (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) = (None, None);
                    (stored.group_idx, stored.extra_keys) = (None, Vec::new());
                }
            },
            KvEvent::BlockRemoved(removed) => {
                if format != WireFormat::VllmMap {
                    (removed.locality, removed.remaining_copy_counts) = (None, None);
                }
                if matches!(format, WireFormat::SglangMap | WireFormat::SglangArray) {
                    removed.group_idx = None;
                }
            }
            KvEvent::AllBlocksCleared => {}
        }
    }
    batch
}

const FORMATS: [WireFormat; 4] =
    [WireFormat::VllmMap, WireFormat::VllmArray, WireFormat::SglangMap, WireFormat::SglangArray];

/// Bytes on the heap, by capacity.
fn heap(decoded: &Decoded) -> usize {
    let text = |text: &Option<String>| text.as_ref().map_or(0, String::capacity);
    let hash = |hash: &EngineHash| match hash {
        EngineHash::Int(_) => 0,
        EngineHash::Bytes(bytes) => bytes.len(),
    };
    let hashes = |hashes: &Vec<EngineHash>| {
        hashes.capacity() * size_of::<EngineHash>() + hashes.iter().map(hash).sum::<usize>()
    };
    let key = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => text.capacity(),
        ExtraKey::Raw(bytes) => bytes.len(),
    };
    let keys =
        |keys: &Vec<ExtraKey>| keys.capacity() * size_of::<ExtraKey>() + keys.iter().map(key).sum::<usize>();
    let event = |event: &KvEvent| match event {
        KvEvent::BlockStored(s) => {
            hashes(&s.block_hashes)
                + s.parent_block_hash.as_ref().map_or(0, hash)
                + s.token_ids.capacity() * size_of::<u32>()
                + [&s.medium, &s.lora_name, &s.kv_cache_spec_kind, &s.cache_salt, &s.session_id, &s.locality]
                    .into_iter()
                    .map(text)
                    .sum::<usize>()
                + s.extra_keys.capacity() * size_of::<Vec<ExtraKey>>()
                + s.extra_keys.iter().map(keys).sum::<usize>()
        }
        KvEvent::BlockRemoved(r) => {
            let counts = r.remaining_copy_counts.as_ref().map_or(0, Vec::capacity);
            hashes(&r.block_hashes) + text(&r.medium) + text(&r.locality) + counts * size_of::<u32>()
        }
        KvEvent::AllBlocksCleared => 0,
    };
    decoded.batch.events.capacity() * size_of::<KvEvent>()
        + decoded.batch.events.iter().map(event).sum::<usize>()
}

/// A vector that grows by doubling starts at four events.
const HEAP_AT_LEAST: usize = 4 * size_of::<KvEvent>();

#[track_caller]
fn harmless(payload: &[u8]) {
    if let Ok(decoded) = EventBatch::decode(payload) {
        let heap = heap(&decoded);
        assert!(heap <= HEAP_AT_LEAST + BYTES_PER_BYTE * payload.len(), "{heap} of {}", payload.len());
    }
}

#[test]
fn what_is_decoded_takes_memory_in_proportion_to_its_bytes() {
    for events in [1, 100, 1025, 4097] {
        harmless(&batch_of(events, |w| {
            for _ in 0..events {
                w.array(1);
                w.text("AllBlocksCleared");
            }
        }));
    }
    let keys = |w: &mut Writer| (0..1000).for_each(|_| w.text(""));
    let of_keys = |keys: &dyn Fn(&mut Writer)| {
        batch_of(1, |w| {
            w.map(3);
            w.text("type");
            w.text("BlockStored");
            w.text("block_hashes");
            w.array(1000);
            (0..1000).for_each(|_| w.uint(1));
            w.text("extra_keys");
            keys(w);
        })
    };
    harmless(&of_keys(&|w| {
        w.array(1);
        w.array(1000);
        keys(w);
    }));
    harmless(&of_keys(&|w| {
        w.array(1000);
        (0..1000).for_each(|_| w.nil());
    }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn what_is_encoded_is_decoded(batch in batch()) {
        for format in FORMATS {
            let decoded = EventBatch::decode(&batch.encode(format)).unwrap();
            prop_assert_eq!((decoded.malformed, decoded.unknown), (0, 0));
            prop_assert_eq!(decoded.batch, without_the_unsayable(batch.clone(), format));
        }
    }

    #[test]
    fn maps_come_in_any_order_and_with_unknown_keys(seed in any::<u64>(), extra in 0_usize..4) {
        let mut fields: Vec<(&str, Write)> = vec![
            ("type", Box::new(|w| w.text("BlockStored"))),
            ("block_hashes", Box::new(|w| { w.array(1); w.uint(3); })),
            ("token_ids", Box::new(|w| { w.array(2); w.uint(1); w.uint(2); })),
            ("block_size", Box::new(|w| w.uint(2))),
            ("medium", Box::new(|w| w.text("GPU"))),
        ];
        for name in ["origin", "ownership", "7"].iter().take(extra) {
            fields.push((name, Box::new(|w| { w.array(1); w.text("anything"); })));
        }
        let mut random = seed;
        for i in (1..fields.len()).rev() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            fields.swap(i, (random >> 33) as usize % (i + 1));
        }
        let payload = batch_of(1, |w| {
            w.map(fields.len());
            for (name, value) in &fields {
                w.text(name);
                value(w);
            }
        });
        let expected = BlockStored { medium: some("GPU"), ..stored(&[3], None, &[1, 2]) };
        prop_assert_eq!(EventBatch::decode(&payload).unwrap().batch.events, [KvEvent::BlockStored(expected)]);
    }

    #[test]
    fn random_bytes_do_no_harm(payload in prop::collection::vec(any::<u8>(), 0..300)) {
        harmless(&payload);
    }

    #[test]
    fn damaged_batches_do_no_harm(
        batch in batch(),
        format in prop::sample::select(&FORMATS[..]),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut payload = batch.encode(format);
        for (at, byte) in damage {
            let at = at.index(payload.len());
            payload[at] = byte;
        }
        if cuts {
            payload.truncate(cut.index(payload.len()));
        }
        harmless(&payload);
    }

    #[test]
    fn a_request_and_its_replies_survive_their_frames(
        seq in 0..u64::MAX,
        payload in prop::collection::vec(any::<u8>(), 1..9),
    ) {
        use frames::{END_SEQ, Live, ReplayReply, ReplayRequest, seq_frame};
        for request in [ReplayRequest::From(seq), ReplayRequest::Snapshot] {
            assert_eq!(ReplayRequest::parse(&request.frames()), Some(request));
        }
        let (empty, number): (&[u8], _) = (b"", seq_frame(seq));
        let batch = Some(ReplayReply::Batch { seq, payload: &payload });
        assert_eq!(ReplayReply::parse(&[empty, &number, &payload]), batch);
        assert_eq!(ReplayReply::parse(&[empty, b"topic", &number, &payload]), batch);
        for end in [&[empty, b"", &END_SEQ, b""][..], &[empty, &END_SEQ, b""], &[empty, b""], &[empty]] {
            assert_eq!(ReplayReply::parse(end), Some(ReplayReply::End));
        }
        let live = Live { topic: b"t", seq, payload: &payload };
        assert_eq!(Live::parse(&[&b"t"[..], &number, &payload]), Some(live));
        assert_eq!(Live::parse(&[&b"t"[..], &number[1..], &payload]), None);
        assert_eq!(ReplayReply::parse(&[empty, &number[1..], &payload]), None);
    }
}
