#!/bin/bash
git apply <<'EOF'
--- a/Csv.java
+++ b/Csv.java
@@ -12,7 +12,10 @@
         boolean quoted = false;
         for (int at = 0; at < line.length(); at++) {
             char c = line.charAt(at);
-            if (c == '"') {
+            if (quoted && line.startsWith("\"\"", at)) {
+                field.append(c);
+                at++;
+            } else if (c == '"') {
                 quoted = !quoted;
             } else if (c == ',' && !quoted) {
                 fields.add(field.toString());
EOF
