//! What each family is, for people: `deploy/METRICS.md` is made of this, so it cannot fall behind. To write
//! it anew: `KEYWAY_WRITE_DOCS=1 cargo test -p keyway --lib metrics::reference`.

use prometheus::core::Desc;

/// One family of series.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// Its name, without the suffixes of a histogram.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Names of its labels; none where it is a single series.
    pub labels: Vec<String>,
    /// What it counts or measures, as `# HELP` says it.
    pub help: String,
}

impl Family {
    pub(super) fn new(desc: &Desc, kind: &'static str) -> Self {
        let (name, help, labels) = (desc.fq_name.clone(), desc.help.clone(), desc.variable_labels.clone());
        Self { name, kind, labels, help }
    }
}

#[cfg(test)]
mod tests {
    use std::{fmt::Write, fs, path::Path};

    use crate::metrics::Metrics;

    const HEAD: &str = "\
# Metrics of the gateway

`/metrics` of the admin listener, in Prometheus' text format. Made from the declarations in `gateway/src/metrics*`; a test
fails when it is stale. A worker's series go when it has left; model names that the fleet does not have are `other`.
Histograms have the series `_bucket`, `_sum` and `_count`.

| name | kind | labels | says |
|---|---|---|---|
";

    fn page() -> String {
        let metrics = Metrics::new().unwrap();
        let mut families = metrics.families().to_vec();
        families.sort_by(|a, b| a.name.cmp(&b.name));
        let mut page = HEAD.to_owned();
        for family in families {
            let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, labels, help) = (family.name, family.kind, labels.join(", "), family.help);
            writeln!(page, "| `{name}` | {kind} | {labels} | {help} |").unwrap();
        }
        page
    }

    #[test]
    fn the_reference_is_what_is_declared() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/METRICS.md");
        let page = page();
        if std::env::var_os("KEYWAY_WRITE_DOCS").is_some() {
            fs::write(&path, &page).unwrap();
        }
        assert!(fs::read_to_string(&path).is_ok_and(|written| written == page), "stale: see the file's head");
    }

    #[test]
    fn every_name_says_whose_and_counts_end_as_counts_do() {
        for family in Metrics::new().unwrap().families() {
            assert!(family.name.starts_with("keyway_"), "{family:?}");
            assert_eq!(family.kind == "counter", family.name.ends_with("_total"), "{family:?}");
            assert!(family.help.ends_with('.'), "{family:?}");
        }
    }
}
