#!/bin/bash
git apply <<'EOF'
--- a/src/lib.rs
+++ b/src/lib.rs
@@ -2,5 +2,10 @@
 
 /// Return the newest of the versions, which are numbers with dots between them.
 pub fn newest<'a>(versions: &[&'a str]) -> Option<&'a str> {
-    versions.iter().copied().max()
+    versions.iter().copied().max_by_key(|version| numbers(version))
 }
+
+
+fn numbers(version: &str) -> Vec<u64> {
+    version.split('.').map(|part| part.parse().unwrap_or(0)).collect()
+}
EOF
