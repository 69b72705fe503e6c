//! A worker's list of models, as its `/v1/models` has it.

use std::{num::NonZeroU16, sync::Arc};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::fleet::Model;

/// The entries that have an id; `None` where it is no list. Some engines have the list alone, without an
/// object around it.
pub(super) fn read_models(body: &[u8]) -> Option<Vec<Model>> {
    #[derive(Deserialize)]
    struct Object {
        data: Vec<Box<RawValue>>,
    }
    #[derive(Deserialize)]
    struct Entry {
        id: String,
        numerics_id: Option<serde_json::Value>,
        /// vLLM: the base model of a LoRA adapter.
        #[serde(default)]
        parent: Option<String>,
        /// vLLM, SGLang and keyway-worker.
        max_model_len: Option<serde_json::Value>,
        /// keyway-worker, which may give others its KV.
        kv_source_port: Option<serde_json::Value>,
    }
    let object = || serde_json::from_slice(body).map(|Object { data }| data);
    let list: Vec<Box<RawValue>> = object().or_else(|_| serde_json::from_slice(body)).ok()?;
    let model = |json: Box<RawValue>| {
        let entry = serde_json::from_str(json.get()).ok()?;
        let Entry { id, numerics_id, parent, max_model_len, kv_source_port } = entry;
        let numerics_id = numerics_id.and_then(|id| id.as_str().map(Arc::from));
        let context = max_model_len.and_then(|tokens| tokens.as_u64()).filter(|tokens| *tokens > 0);
        let port = kv_source_port.and_then(|port| port.as_u64()?.try_into().ok());
        let kv_source_port = port.and_then(NonZeroU16::new);
        Some(Model { id, parent, json, context, numerics_id, kv_source_port })
    };
    Some(list.into_iter().filter_map(model).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_entries_keep_their_json_and_odd_ones_are_skipped() {
        let models =
            read_models(br#"{"object":"list","data":[{"id":"a","x":[1, 2]},{"no":"id"},7]}"#).unwrap();
        assert_eq!(models.len(), 1);
        assert_eq!(models[0].json.get(), r#"{"id":"a","x":[1, 2]}"#);
        assert_eq!(models[0].numerics_id, None);
        let worker =
            read_models(br#"{"data":[{"id":"a","numerics_id":"cpu-1"},{"id":"b","numerics_id":7}]}"#)
                .unwrap();
        assert_eq!((worker.len(), &worker[1].numerics_id), (2, &None));
        assert_eq!(worker[0].numerics_id.as_deref(), Some("cpu-1"));
        let lengths = br#"[{"id":"a","max_model_len":4096},{"id":"b","max_model_len":null},{"id":"c","max_model_len":"x"}]"#;
        let contexts: Vec<_> = read_models(lengths).unwrap().iter().map(|model| model.context).collect();
        assert_eq!(contexts, [Some(4096), None, None]);
        let ports = br#"[{"id":"a","kv_source_port":7000},{"id":"b","kv_source_port":0},{"id":"c","kv_source_port":70000}]"#;
        let ports: Vec<_> = read_models(ports).unwrap().iter().map(|model| model.kv_source_port).collect();
        assert_eq!(ports, [NonZeroU16::new(7000), None, None]);
        for no_list in [&b"<html>"[..], b"", b"{}", b"7", b"{\"data\":7}", b"\"data\""] {
            assert!(read_models(no_list).is_none());
        }
        let alone = read_models(br#"[{"id":"a"},{"id":"b"}]"#).unwrap();
        assert_eq!(alone.iter().map(|model| model.id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let adapter = read_models(br#"{"data":[{"id":"a","parent":null},{"id":"l","parent":"a"}]}"#).unwrap();
        assert_eq!((adapter[0].parent.as_deref(), adapter[1].parent.as_deref()), (None, Some("a")));
    }
}
