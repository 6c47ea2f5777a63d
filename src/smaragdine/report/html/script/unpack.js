// The document that pack.py wrote: JSON whose {"$": …} are arrays of numbers.

const TYPES = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };

async function unpack(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const unzipped = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(unzipped).arrayBuffer());
  const end = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const json = new TextDecoder().decode(bytes.subarray(4, end));
  return JSON.parse(json, (key, value) =>
    value && value.$ ? numbers(bytes.subarray(end), ...value.$) : value,
  );
}

function numbers(bytes, type, offset, length, differences, divisor) {
  const size = TYPES[type].BYTES_PER_ELEMENT;
  const joined = new Uint8Array(length * size);
  for (let plane = 0; plane < size; plane++) {
    const from = offset + plane * length;
    for (let i = 0; i < length; i++) joined[i * size + plane] = bytes[from + i];
  }
  const stored = new TYPES[type](joined.buffer);
  if (!differences && divisor === 1) return stored;
  const values = Float64Array.from(stored);
  if (differences) for (let i = 1; i < length; i++) values[i] += values[i - 1];
  if (divisor !== 1) for (let i = 0; i < length; i++) values[i] /= divisor;
  return values;
}
