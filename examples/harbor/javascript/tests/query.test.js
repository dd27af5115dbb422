'use strict';

const assert = require('node:assert');
const test = require('node:test');
const { parse } = require('/app/query.js');

test('a value may have equals signs', () => {
  assert.deepStrictEqual(parse('token=YWI=&page=2'), { token: 'YWI=', page: '2' });
  assert.deepStrictEqual(parse('a==%3D'), { a: '==' });
});

test('other fields', () => {
  assert.deepStrictEqual(parse('a=1&b&c=x%20y'), { a: '1', b: '', c: 'x y' });
});
