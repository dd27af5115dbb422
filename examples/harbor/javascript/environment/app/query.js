'use strict';

/** Return the fields of a query string by their names. A field without a value is an empty text. */
function parse(query) {
  const fields = {};
  for (const part of query.split('&').filter(Boolean)) {
    const [name, value = ''] = part.split('=');
    fields[decodeURIComponent(name)] = decodeURIComponent(value);
  }
  return fields;
}

module.exports = { parse };
