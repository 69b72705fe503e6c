//! Which ids a request names and an answer hands out. By a rule rather than a list of the API's collections:
//! what stands behind a path's first word is an id, unless nothing is stored below that word.

use smallvec::SmallVec;

use crate::{
    json::Value,
    limits::{MAX_STORED_ID_BYTES, STORED_REFERENCES_MAX},
};

/// First words of paths under `/v1/` below which nothing is stored that an id names.
const STATELESS: [&str; 17] = [
    "audio",
    "classify",
    "completions",
    "detokenize",
    "embeddings",
    "engines",
    "images",
    "load_lora_adapter",
    "loads",
    "models",
    "moderations",
    "pooling",
    "realtime",
    "rerank",
    "score",
    "tokenize",
    "unload_lora_adapter",
];

/// Collections whose names are two words.
const TWO_WORDS: [(&str, &str); 4] =
    [("chat", "completions"), ("fine_tuning", "jobs"), ("messages", "batches"), ("organization", "")];

/// What stands in an id's place and is none.
const ACTIONS: [&str; 6] = ["batch", "compact", "input_tokens", "render", "runs", "search"];

/// Fields of requests whose ids are of a kind.
const FIELDS: [(&str, StoredKind); 14] = [
    ("previous_response_id", StoredKind::Response),
    ("response_id", StoredKind::Response),
    ("conversation", StoredKind::Conversation),
    ("conversation_id", StoredKind::Conversation),
    ("file_id", StoredKind::File),
    ("input_file_id", StoredKind::File),
    ("training_file", StoredKind::File),
    ("validation_file", StoredKind::File),
    ("batch_id", StoredKind::Batch),
    ("assistant_id", StoredKind::Assistant),
    ("thread_id", StoredKind::Thread),
    ("vector_store_id", StoredKind::VectorStore),
    ("file", StoredKind::Other),
    ("video_id", StoredKind::Other),
];

/// What an id is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredKind {
    /// `/v1/responses`; requests name them in `previous_response_id` or `response_id`.
    Response,
    /// `/v1/conversations`; requests name them in `conversation` or `conversation_id`.
    Conversation,
    /// `/v1/files`; requests name them in `file_id`, `input_file_id`, `training_file` or `validation_file`.
    File,
    /// `/v1/batches`; requests name them in `batch_id`.
    Batch,
    /// `/v1/assistants`; requests name them in `assistant_id`.
    Assistant,
    /// `/v1/threads`; requests name them in `thread_id`.
    Thread,
    /// `/v1/vector_stores`; requests name them in `vector_store_id`.
    VectorStore,
    /// Something else; maybe nothing that is stored.
    Other,
}

/// The fields of a body that may name ids: of each of `FIELDS` the last, as engines read them, and some
/// others.
#[derive(Debug, Clone, Default)]
pub struct Named<'a> {
    of_a_kind: SmallVec<[(&'static str, StoredKind, Value<'a>); 1]>,
    others: SmallVec<[Value<'a>; 1]>,
}

impl<'a> Named<'a> {
    /// Takes a field, if it may name one.
    pub fn take(&mut self, name: &str, value: Value<'a>) {
        if let Some((field, kind)) = FIELDS.into_iter().find(|(field, _)| *field == name) {
            self.of_a_kind.retain(|(known, ..)| *known != field);
            self.of_a_kind.push((field, kind, value));
        } else if name.ends_with("_id") && self.others.len() < STORED_REFERENCES_MAX {
            self.others.push(value);
        }
    }
}

/// An id that a body names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// What it is of.
    pub kind: StoredKind,
    /// The id as the body has it, not empty and of bounded length.
    pub id: String,
}

/// Where a path points to: a collection, and what of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredPath<'a> {
    /// The collection's own path.
    pub collection: &'a str,
    /// The id behind the collection; `None` where there is none, or an action in its place.
    pub id: Option<&'a str>,
    /// What follows the id or the action, without the slash before it; often empty.
    pub rest: &'a str,
    /// Whether something is done with the collection, in the id's place.
    action: bool,
}

impl StoredKind {
    /// The path of what has such ids.
    pub fn collection(self) -> Option<&'static str> {
        match self {
            Self::Response => Some("/v1/responses"),
            Self::Conversation => Some("/v1/conversations"),
            Self::File => Some("/v1/files"),
            Self::Batch => Some("/v1/batches"),
            Self::Assistant => Some("/v1/assistants"),
            Self::Thread => Some("/v1/threads"),
            Self::VectorStore => Some("/v1/vector_stores"),
            Self::Other => None,
        }
    }
}

impl Reference {
    /// Those of a body's fields.
    pub fn all(named: Named<'_>) -> Vec<Self> {
        // Mostly there are none.
        if named.of_a_kind.is_empty() && named.others.is_empty() {
            return Vec::new();
        }
        let of_a_kind = named.of_a_kind.into_iter().map(|(_, kind, value)| (kind, value));
        let others = named.others.into_iter().map(|value| (StoredKind::Other, value));
        of_a_kind.chain(others).filter_map(|(kind, value)| Some(Self { kind, id: id_in(value)? })).collect()
    }
}

/// A string, or the `id` of an object.
fn id_in(value: Value<'_>) -> Option<String> {
    let of_object = || {
        let mut fields = value.fields()?.map_while(Result::ok);
        fields.find(|(name, _)| name == "id")?.1.text()
    };
    is_id(&value.text().or_else(of_object)?)
}

fn is_id(id: &str) -> Option<String> {
    (!id.is_empty() && id.len() <= MAX_STORED_ID_BYTES).then(|| id.to_owned())
}

impl<'a> StoredPath<'a> {
    /// `None` where nothing is stored.
    pub fn of(path: &'a str) -> Option<Self> {
        const ROOT: &str = "/v1/";
        let below = path.strip_prefix(ROOT)?;
        let first = below.split('/').next()?;
        if STATELESS.contains(&first) || first.is_empty() {
            return None;
        }
        let second = below.split('/').nth(1).unwrap_or_default();
        let two = TWO_WORDS.iter().find(|(word, _)| *word == first);
        if two.is_some_and(|(_, word)| *word != second && !word.is_empty()) {
            return None;
        }
        let words = first.len() + if two.is_some() { 1 + second.len() } else { 0 };
        let (collection, rest) = path.split_at_checked(ROOT.len() + words)?;
        let rest = rest.strip_prefix('/').unwrap_or_default();
        let (id, rest) = rest.split_once('/').unwrap_or((rest, ""));
        let action = ACTIONS.contains(&id);
        let id = Some(id).filter(|id| !id.is_empty() && !action);
        Some(Self { collection, id, rest, action })
    }

    /// Whether what is made there is stored, given what the request says of that.
    pub fn stores(&self, said: Option<bool>) -> bool {
        match (self.collection, self.id) {
            ("/v1/chat/completions", None) => said == Some(true),
            ("/v1/responses", None) => said != Some(false),
            _ => true,
        }
    }

    /// Its id, and what else may be one behind that.
    pub fn ids(self) -> impl Iterator<Item = &'a str> {
        let behind = self.rest.split('/').filter(|word| !word.is_empty());
        self.id.into_iter().chain(behind).take(STORED_REFERENCES_MAX)
    }

    /// Whether it is the whole collection.
    pub fn is_whole(self) -> bool {
        self.id.is_none() && self.rest.is_empty() && !self.action
    }
}

/// The ids that an answer, or a stream's event, hands out: its own, those of files made for it, and of what
/// it belongs to.
pub(crate) fn handed_out(text: &str, mut take: impl FnMut(&str)) {
    let mut open = vec![Value::document(text)];
    while let Some(fields) = open.pop() {
        for (name, value) in fields.into_iter().flatten().map_while(Result::ok) {
            match name.as_ref() {
                "id" => {}
                name if name.ends_with("_file_id") => {}
                // Nothing that a client may have put there, such as its metadata.
                "response" | "conversation" | "file" if value.fields().is_some() && open.len() < 4 => {
                    open.push(value.fields());
                    continue;
                }
                "conversation" => {}
                _ => continue,
            }
            if let Some(id) = value.text().and_then(|id| is_id(&id)) {
                take(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(path: &str) -> Option<(&str, Option<&str>)> {
        StoredPath::of(path).map(|place| (place.collection, place.id))
    }

    #[test]
    fn an_id_stands_behind_its_collection() {
        for (path, collection, id) in [
            ("/v1/responses", "/v1/responses", None),
            ("/v1/responses/resp_1", "/v1/responses", Some("resp_1")),
            ("/v1/responses/resp_1/cancel", "/v1/responses", Some("resp_1")),
            ("/v1/responses/input_tokens", "/v1/responses", None),
            ("/v1/files/file-w1/content", "/v1/files", Some("file-w1")),
            ("/v1/vector_stores/vs_1/files/f", "/v1/vector_stores", Some("vs_1")),
            ("/v1/chat/completions/c/messages", "/v1/chat/completions", Some("c")),
            ("/v1/chat/completions/batch", "/v1/chat/completions", None),
            ("/v1/chat/completions/render", "/v1/chat/completions", None),
            ("/v1/fine_tuning/jobs/ft-1/events", "/v1/fine_tuning/jobs", Some("ft-1")),
            ("/v1/messages/batches/b/results", "/v1/messages/batches", Some("b")),
            ("/v1/threads/runs", "/v1/threads", None),
            ("/v1/something_new/x", "/v1/something_new", Some("x")),
            ("/v1/files/", "/v1/files", None),
        ] {
            assert_eq!(place(path), Some((collection, id)), "{path}");
        }
        for path in [
            "/v1/completions",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models/m",
            "/v1/audio/speech",
            "/tokenize",
            "/v1/",
            "/v1/chat",
        ] {
            assert_eq!(place(path), None, "{path}");
        }
    }

    #[test]
    fn only_what_is_stored_is_looked_for() {
        let stores = |path, said| StoredPath::of(path).unwrap().stores(said);
        assert!(stores("/v1/responses", None) && stores("/v1/responses", Some(true)));
        assert!(!stores("/v1/responses", Some(false)));
        assert!(!stores("/v1/chat/completions", None) && stores("/v1/chat/completions", Some(true)));
        assert!(stores("/v1/chat/completions/c", None) && stores("/v1/files", Some(false)));
    }

    #[test]
    fn whatever_stands_behind_an_id_may_be_one() {
        let place = StoredPath::of("/v1/vector_stores/vs_1/files//f_2/").unwrap();
        assert_eq!(place.ids().collect::<Vec<_>>(), ["vs_1", "files", "f_2"]);
        assert!(
            StoredPath::of("/v1/files").unwrap().is_whole()
                && StoredPath::of("/v1/files/").unwrap().is_whole()
        );
        assert!(!place.is_whole() && !StoredPath::of("/v1/threads/runs").unwrap().is_whole());
    }

    /// The ids that fields name.
    fn named(fields: &[(&str, &'static str)]) -> Vec<(StoredKind, String)> {
        let mut named = Named::default();
        for (name, value) in fields {
            named.take(name, Value::found(value));
        }
        Reference::all(named).into_iter().map(|reference| (reference.kind, reference.id)).collect()
    }

    #[test]
    fn a_body_s_fields_name_ids_by_their_names() {
        for (field, kind) in [
            ("previous_response_id", Some(StoredKind::Response)),
            ("conversation", Some(StoredKind::Conversation)),
            ("input_file_id", Some(StoredKind::File)),
            ("file_id", Some(StoredKind::File)),
            ("training_file", Some(StoredKind::File)),
            ("skill_id", Some(StoredKind::Other)),
            ("model", None),
            ("id", None),
        ] {
            let named = named(&[(field, r#""a""#)]);
            assert_eq!(named.first().map(|(kind, _)| *kind), kind, "{field}");
        }
        for (value, id) in [
            (r#""a""#, Some("a")),
            (r#"{"x":1,"id":"b"}"#, Some("b")),
            ("3", None),
            ("null", None),
            (r#""""#, None),
            (r#"{"id":4}"#, None),
        ] {
            let named = named(&[("conversation", value)]);
            assert_eq!(named.first().map(|(_, id)| id.as_str()), id, "{value}");
        }
    }

    #[test]
    fn no_other_fields_hide_one_and_of_a_repeated_one_the_last_counts() {
        let mut fields = vec![("a_id", r#""x""#); 1_000];
        fields.extend([("previous_response_id", r#""a""#), ("previous_response_id", r#""b""#)]);
        fields.extend(vec![("b_id", r#""y""#); 1_000]);
        let named = named(&fields);
        assert_eq!(named[0], (StoredKind::Response, "b".to_owned()));
        assert_eq!(named.len(), 1 + STORED_REFERENCES_MAX);
    }

    #[test]
    fn an_answer_hands_out_its_own_ids_and_none_of_its_client_s() {
        let handed = |text: &str| {
            let mut ids = Vec::new();
            handed_out(text, |id| ids.push(id.to_owned()));
            ids.sort();
            ids
        };
        assert_eq!(handed(r#"{"object":"response","id":"resp_1","output":[{"id":"msg_1"}]}"#), ["resp_1"]);
        let batch = r#"{"id":"b","input_file_id":"in","output_file_id":"out","error_file_id":null}"#;
        assert_eq!(handed(batch), ["b", "in", "out"]);
        let event = r#"{"type":"response.created","response":{"id":"r","conversation":{"id":"c"},"metadata":{"id":"x"}}}"#;
        assert_eq!(handed(event), ["c", "r"]);
        assert_eq!(handed(r#"{"id":"u","file":{"id":"f"},"conversation":"c"}"#), ["c", "f", "u"]);
        let foreign =
            r#"{"metadata":{"id":"x"},"previous_response_id":"y","user_id":"z","prompt":{"id":"p"}}"#;
        assert!(handed(foreign).is_empty());
        // What was cut says what it says before the cut.
        assert_eq!(handed(r#"{"id":"a","output":[{"text":"lo"#), ["a"]);
        assert!(handed("[]").is_empty() && handed("").is_empty() && handed(r#"{"id":""}"#).is_empty());
    }
}
