// Package lru has a cache that forgets what was not used for longest.
package lru

import "container/list"

type entry struct{ key, value string }

// Cache holds a limited number of values by their keys.
type Cache struct {
	size    int
	order   *list.List // the most recently used one first
	entries map[string]*list.Element
}

// New returns an empty cache for so many values.
func New(size int) *Cache {
	return &Cache{size, list.New(), map[string]*list.Element{}}
}

// Get returns the value of a key, and whether there is one.
func (c *Cache) Get(key string) (string, bool) {
	element, found := c.entries[key]
	if !found {
		return "", false
	}
	return element.Value.(*entry).value, true
}

// Put sets the value of a key. If the cache is full, the value that was not used for longest is forgotten.
func (c *Cache) Put(key, value string) {
	if element, found := c.entries[key]; found {
		element.Value.(*entry).value = value
		c.order.MoveToFront(element)
		return
	}
	if c.order.Len() == c.size {
		oldest := c.order.Back()
		c.order.Remove(oldest)
		delete(c.entries, oldest.Value.(*entry).key)
	}
	c.entries[key] = c.order.PushFront(&entry{key, value})
}
