#!/bin/bash
git apply <<'EOF'
--- a/lru.go
+++ b/lru.go
@@ -23,6 +23,7 @@
 	if !found {
 		return "", false
 	}
+	c.order.MoveToFront(element)
 	return element.Value.(*entry).value, true
 }
 
EOF
