#!/bin/bash
git apply <<'EOF'
--- a/lists.py
+++ b/lists.py
@@ -3,4 +3,8 @@
 
 def unique(items):
     """Return a list of the items, each once, in the order in which they came first."""
-    return list(set(items))
+    found = []
+    for item in items:
+        if item not in found:
+            found.append(item)
+    return found
EOF
