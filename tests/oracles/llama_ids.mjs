// llama.cpp's token ids: `node llama_ids.mjs FOLDER TEXTS.json FILE.gguf ...`, where FOLDER is where node-llama-cpp is installed.
//
// Prints {version, files: {FILE: {begins, ids: [[id, ...] of each text]}}}. Special tokens are found in the texts; none is added.

import {readFileSync} from "node:fs";
import {join} from "node:path";
import {pathToFileURL} from "node:url";

const [folder, texts, ...files] = process.argv.slice(2);
const place = join(folder, "node_modules", "node-llama-cpp");
const {getLlama} = await import(pathToFileURL(join(place, "dist", "index.js")));
const llama = await getLlama({gpu: false, build: "never", logLevel: "disabled"});
const asked = JSON.parse(readFileSync(texts));
const found = {};
for (const file of files) {
    const model = await llama.loadModel({modelPath: file, vocabOnly: true}).catch(() => null);
    if (model === null) continue;  // a name that this build does not know
    found[file] = {begins: model.tokens.shouldPrependBosToken, ids: asked.map((text) => [...model.tokenize(text, true)])};
    await model.dispose();
}
const version = JSON.parse(readFileSync(join(place, "package.json"))).version;
console.log(JSON.stringify({version: `${llama.llamaCppRelease?.release} (node-llama-cpp ${version})`, files: found}));
