//! Whether what a configuration names can be used: its files are opened, its patterns compiled. The start, a
//! reload and `keyway config check` all ask here, so what one of them takes the others take too.

use crate::{
    access::tenants,
    config::{Config, ConfigError},
    net::tls,
    prompt::ignored::Ignored,
    watch::kubernetes,
};

/// The error names the first thing that cannot be used.
pub fn can_be_used(config: &Config) -> Result<(), ConfigError> {
    config.tls.as_ref().map(tls::check).transpose()?;
    tenants::check(config.tenants_file.as_deref(), &config.tenant_rules)?;
    config.discovery.kubeconfig.as_deref().map(kubernetes::check).transpose()?;
    Ignored::new(&config.routing.ignored).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::File;

    #[test]
    fn what_cannot_be_used_is_named() {
        for (text, word) in [
            ("[tls]\ncert_file = \"/nowhere\"\nkey_file = \"k\"", "/nowhere"),
            ("[auth]\ntenants_file = \"/nowhere\"", "/nowhere"),
            ("[auth]\nsteering = [\"priorities\"]", "\"priorities\""),
            ("[discovery]\nkubeconfig = \"/nowhere\"", "/nowhere"),
            ("[[routing.ignore]]\nfield = \"system\"\npattern = \"(\"", "unclosed group"),
            ("[[routing.ignore]]\nfield = \"model\"\npattern = \"a\"", "messages.FIELD"),
        ] {
            let config = Config::try_from(File::parse(text).unwrap()).unwrap();
            let error = can_be_used(&config).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn what_names_nothing_can_be_used() {
        can_be_used(&Config::try_from(File::default()).unwrap()).unwrap();
    }
}
