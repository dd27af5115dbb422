//! Versions such as 1.10.2.

/// Return the newest of the versions, which are numbers with dots between them.
pub fn newest<'a>(versions: &[&'a str]) -> Option<&'a str> {
    versions.iter().copied().max()
}
