#!/bin/bash
git apply <<'EOF'
--- a/roman.py
+++ b/roman.py
@@ -5,4 +5,7 @@
 
 def number(text):
     """Return the number that a text of Roman digits stands for. Raises ValueError for other texts."""
-    return sum(VALUES[digit] for digit in text)
+    values = [VALUES.get(digit) for digit in text.upper()]
+    if not values or None in values:
+        raise ValueError(f"{text!r} is no Roman number")
+    return sum(-one if one < next else one for one, next in zip(values, [*values[1:], 0]))
EOF
