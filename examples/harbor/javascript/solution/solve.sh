#!/bin/bash
git apply <<'EOF'
--- a/query.js
+++ b/query.js
@@ -4,8 +4,8 @@
 function parse(query) {
   const fields = {};
   for (const part of query.split('&').filter(Boolean)) {
-    const [name, value = ''] = part.split('=');
-    fields[decodeURIComponent(name)] = decodeURIComponent(value);
+    const [name, ...value] = part.split('=');
+    fields[decodeURIComponent(name)] = decodeURIComponent(value.join('='));
   }
   return fields;
 }
EOF
