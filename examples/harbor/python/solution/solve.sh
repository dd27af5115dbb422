#!/bin/bash
git apply <<'EOF'
--- a/intervals.py
+++ b/intervals.py
@@ -6,7 +6,7 @@
     merged = []
     for start, end in sorted(intervals):
         if merged and start <= merged[-1][1]:
-            merged[-1] = (merged[-1][0], end)
+            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
         else:
             merged.append((start, end))
     return merged
EOF
