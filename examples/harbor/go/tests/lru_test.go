package lru

import "testing"

func TestAReadValueStays(t *testing.T) {
	c := New(2)
	c.Put("a", "1")
	c.Put("b", "2")
	c.Get("a")
	c.Put("c", "3")
	if value, found := c.Get("a"); !found || value != "1" {
		t.Errorf("a was read last, and is %q", value)
	}
	if _, found := c.Get("b"); found {
		t.Error("b was not used for longest, and is still there")
	}
}

func TestAWrittenValueStays(t *testing.T) {
	c := New(2)
	c.Put("a", "1")
	c.Put("b", "2")
	c.Put("a", "3")
	c.Put("c", "4")
	if value, found := c.Get("a"); !found || value != "3" {
		t.Errorf("a was written last, and is %q", value)
	}
}
