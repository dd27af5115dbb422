#!/bin/bash
git apply <<'EOF'
--- a/reports.py
+++ b/reports.py
@@ -3,4 +3,4 @@
 
 def percent(part, whole):
     """Return how much of the whole a part is, in percent."""
-    return 100 * part / whole
+    return round(100 * part / whole, 1)
EOF
